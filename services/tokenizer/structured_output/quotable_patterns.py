r"""`pattern` and the names of `patternProperties`: JSON Schema's expressions (ECMA-262) as Rust's,
fitted to what llguidance (1.9) makes of them.

It quotes a set of characters for JSON as a whole, and takes a set that has all control characters
for one that has all others too: `[^"]` would let an escaped quote through. Here no set has U+0000,
which is never written (json_schema), so every set is quoted character by character.
"""

import re

from triptych.services.tokenizer.structured_output.refusal import Refused, shown

_PART = re.compile(
    r"""
      (?P<nul> \x00 | \\x00 | \\u0000 | \\U0{8} | \\[xuU]\{0*\} )
    | (?P<property> \\[pP](?:\{[^}]*\}|.) )
    | (?P<escape> \\. )
    | (?P<set> \[ )
    | (?P<dot> \. )
    | (?P<flags> \(\?[a-zA-Z-]+[:)] )
    """,
    re.VERBOSE | re.DOTALL,
)
_SET = re.compile(r"\[\^?((?:[^\\\[\]]|\\.)*)\]", re.DOTALL)
_OPERATORS = ("&&", "--", "~~")
_MAY_HAVE_NUL = re.compile(r"^\[\^|\\[xuUpPDSW]|[\x00-\x1f]")

_DOT = r"[^\n\r\x{2028}\x{2029}]"
_BLANKS = {r"\s": r"[[\s\x{feff}]&&[^\x85]]", r"\S": r"[[\S\x85]&&[^\x{feff}]]"}
r"""What `.`, `\s` and `\S` are in ECMA-262; Rust's differ in these characters."""


def quotable(pattern: str) -> str:
    """The expression for the same strings, in Rust's syntax, that is quoted right.

    Raises Refused for what the two syntaxes read differently.
    """
    written: list[str] = []
    position = 0
    while found := _PART.search(pattern, position):
        written.append(pattern[position : found.start()])
        position = found.end()
        match found.lastgroup:
            case "nul":
                raise Refused("U+0000 in an expression is not supported")
            case "property":
                written.append(_without_nul(f"[{found[0]}]"))
            case "set":
                text = _set_at(pattern, found.start())
                position = found.start() + len(text)
                blanks = re.sub(r"\\.", _blanks, text, flags=re.DOTALL)
                written.append(_without_nul(blanks) if _MAY_HAVE_NUL.search(text) else blanks)
            case "dot":
                written.append(_DOT)
            case "flags" if found[0].strip("(?:)") != "i":
                raise Refused(f"{shown(found[0])} is not supported: of flags only i is")
            case _:
                written.append(_blanks(found))
    written.append(pattern[position:])
    return "".join(written)


def _blanks(escape: "re.Match[str]") -> str:
    return _BLANKS.get(escape[0], escape[0])


def _set_at(pattern: str, start: int) -> str:
    found = _SET.match(pattern, start)
    what = shown(pattern[start:])
    if found is None:
        raise Refused(f"the set {what} is not closed, or has a bracket that must be written \\[")
    if not found[1]:
        raise Refused(f"the set {what} is empty, or begins with a bracket that must be written \\]")
    for operator in _OPERATORS:
        if operator in re.sub(r"\\.", "", found[1], flags=re.DOTALL):
            raise Refused(f"{operator} in the set {shown(found[0])} is not supported")
    return found[0]


def _without_nul(text: str) -> str:
    return rf"[{text}&&[^\x00]]"
