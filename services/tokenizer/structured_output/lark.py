"""A client's own grammar: llguidance's variant of Lark, or GBNF, which is turned into it.

What would not be kept, or means something only together with one vocabulary, is refused by name:
tokens by name or number, limits in tokens, temperatures, other grammars. JSON Schemas inside are
checked like any other.
"""

import re
from typing import NoReturn

from llguidance.gbnf_to_lark import gbnf_to_lark

from triptych.services.tokenizer.structured_output.json_schema import JsonText, compiled_schema
from triptych.services.tokenizer.structured_output.refusal import Refused, shown
from triptych.services.tokenizer.structured_output.strict_json import (
    parse_json_within,
    written_json,
)

MAX_GRAMMAR_BYTES = 64 << 10

_GBNF_RULE = re.compile(r"^[ \t]*[A-Za-z0-9_-]+[ \t]*::=", re.MULTILINE)
_GBNF_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_NEEDS_ESCAPE = frozenset('"\\[]-^/')
_LARK_TOKEN = re.compile(
    r"""
      (?P<skip> "(?:[^"\\]|\\.)*" | //[^\n]* | \#[^\n]* | /(?:[^/\\]|\\.)+/ )
    | (?P<token> <[^<>\s]*> )
    | (?P<other> @[\w-]+ )
    | (?P<option> \b(?:temperature|max_tokens|stop)[ \t]*= )
    | (?P<json> %json\b )
    | (?P<settings> %llguidance\b )
    """,
    re.VERBOSE,
)
_SETTINGS = frozenset({"no_forcing", "skip_repetition"})


def checked_lark(text: str, json_text: JsonText) -> str:
    """A grammar of either kind as Lark, its schemas checked. Raises Refused."""
    size = len(text.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise Refused(f"{size} bytes, more than {MAX_GRAMMAR_BYTES}")
    if not text.strip():
        raise Refused("it is empty")
    if _GBNF_RULE.search(text):
        text = _from_gbnf(text)
    written: list[str] = []
    position = 0
    while found := _LARK_TOKEN.search(text, position):
        written.append(text[position : found.start()])
        position = found.end()
        match found.lastgroup:
            case "json":
                schema, position = parse_json_within(text, position)
                try:
                    schema = compiled_schema(schema, json_text)
                except Refused as refused:
                    raise Refused(f"%json at {_line(text, found.start())}: {refused}") from refused
                written.append(f"%json {written_json(schema)}")
            case "settings":
                settings, position = parse_json_within(text, position)
                if not isinstance(settings, dict) or settings.keys() - _SETTINGS:
                    raise Refused(
                        f"%llguidance at {_line(text, found.start())} takes"
                        f" {' and '.join(sorted(_SETTINGS))} here"
                    )
                written.append(f"%llguidance {written_json(settings)}")
            case "skip":
                written.append(found[0])
            case kind:
                _refuse(kind, found[0], _line(text, found.start()))
    written.append(text[position:])
    return "".join(written)


def _refuse(kind: str | None, what: str, line: str) -> NoReturn:
    match kind:
        case "token":
            why = "tokens by name or number are not supported; write text"
        case "other":
            why = "there are no other grammars"
        case _:
            why = "it is not supported; bound a text by a regular expression, as in /.{0,80}/"
    raise Refused(f"{shown(what)} at {line}: {why}")


def _line(text: str, position: int) -> str:
    before = text[:position].count("\n")
    return f"line {before + 1}"


def _from_gbnf(text: str) -> str:
    try:
        return gbnf_to_lark(_GBNF_ESCAPE.sub(_plain, text))
    except Exception as error:  # what the converter raises is of no class of its own
        reason = " ".join(str(error).split())
        if isinstance(error, RecursionError):
            reason = "groups stand too deep in one another"
        raise Refused(f"it is no GBNF: {shown(reason)}") from error


def _plain(escape: "re.Match[str]") -> str:
    """The converter writes \\u0041 in a way that Lark does not read: as the character, then."""
    digits = escape[1] or escape[2]
    if digits is None:
        return escape[0]
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise Refused(f"{escape[0]} is no character")
    character = chr(code)
    if code < 0x20 or code == 0x7F or character in _NEEDS_ESCAPE:
        return f"\\x{code:02x}"
    return character
