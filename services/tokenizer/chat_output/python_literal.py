"""Python literals as JSON text, read strictly: nothing is evaluated, and nothing is guessed.

Numbers, strings (of one or three quotes, no prefixes), True, False, None, lists, tuples, and dicts
whose keys are strings. JSON's true, false and null, and its string escapes, are read as well.
"""

import json
import re

from triptych.services.tokenizer.chat_output.source import NoCall, Source, Steps

MAX_DEPTH = 64

_NUMBER_RUN = re.compile(r"[-+.0-9eE]++")
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_BARE_POINT = re.compile(r"(-?)([0-9]*)\.([0-9]*)")
_WORD_RUN = re.compile(r"[A-Za-z0-9_]++")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_WORDS |= {word: word for word in _WORDS.values()}
_ESCAPED = {
    "\\": "\\", "'": "'", '"': '"', "/": "/", "\n": "", "a": "\a", "b": "\b", "f": "\f",
    "n": "\n", "r": "\r", "t": "\t", "v": "\v",
}  # fmt: skip
_DIGITS_OF = {"x": 2, "u": 4, "U": 8}
_OCTAL = frozenset("01234567")
_HEX = frozenset("0123456789abcdefABCDEF")


def keyword_arguments(source: Source) -> Steps[str]:
    """Read `name=value, ...)` behind a call's opening parenthesis; the JSON object it makes.

    `**{...}` stands for arguments that are given as one dict. Raises NoCall.
    """
    members: dict[str, str] = {}
    yield from source.spaces()
    while (yield from source.peek()) != ")":
        if (yield from source.peek()) == "*":
            yield from source.expect("**")
            pairs = yield from _members(source, 0)
        else:
            name = yield from source.whole_run(_WORD_RUN)
            if not name or name[0].isdigit():
                raise NoCall
            yield from source.spaces()
            yield from source.expect("=")
            yield from source.spaces()
            pairs = {name: (yield from literal(source))}
        if members.keys() & pairs.keys():
            raise NoCall
        members |= pairs
        yield from source.spaces()
        if (yield from source.peek()) != ")":
            yield from source.expect(",")
            yield from source.spaces()
    source.take()
    return _object(members)


def literal(source: Source, depth: int = 0) -> Steps[str]:
    """Read a literal; its JSON. Raises NoCall."""
    if depth > MAX_DEPTH:
        raise NoCall
    character = yield from source.peek()
    match character:
        case '"' | "'":
            return json.dumps((yield from _string(source)), ensure_ascii=False)
        case "[":
            source.take()
            return f"[{', '.join((yield from _elements(source, ']', depth))[0])}]"
        case "(":
            source.take()
            elements, is_tuple = yield from _elements(source, ")", depth)
            return f"[{', '.join(elements)}]" if is_tuple else elements[0]
        case "{":
            return _object((yield from _members(source, depth)))
    if character and character in "-+.0123456789":
        return _number((yield from source.whole_run(_NUMBER_RUN)))
    word = yield from source.whole_run(_WORD_RUN)
    if word not in _WORDS:
        raise NoCall
    return _WORDS[word]


def _elements(source: Source, end: str, depth: int) -> Steps[tuple[list[str], bool]]:
    """The elements up to this end, and whether they are more than one in parentheses."""
    elements: list[str] = []
    several = True
    yield from source.spaces()
    while (yield from source.peek()) != end:
        elements.append((yield from literal(source, depth + 1)))
        yield from source.spaces()
        several = (yield from source.peek()) != end
        if several:
            yield from source.expect(",")
            yield from source.spaces()
    source.take()
    return elements, several or len(elements) != 1


def _members(source: Source, depth: int) -> Steps[dict[str, str]]:
    members: dict[str, str] = {}
    yield from source.expect("{")
    yield from source.spaces()
    while (yield from source.peek()) != "}":
        name = yield from _string(source)
        yield from source.spaces()
        yield from source.expect(":")
        yield from source.spaces()
        members[name] = yield from literal(source, depth + 1)
        yield from source.spaces()
        if (yield from source.peek()) != "}":
            yield from source.expect(",")
            yield from source.spaces()
    source.take()
    return members


def _object(members: dict[str, str]) -> str:
    written = (f"{json.dumps(name, ensure_ascii=False)}: {members[name]}" for name in members)
    return f"{{{', '.join(written)}}}"


def _number(text: str) -> str:
    if _JSON_NUMBER.fullmatch(text):
        return text
    bare = _BARE_POINT.fullmatch(text)  # 5. and .5, which JSON does not have
    if bare is None or not (bare[2] or bare[3]):
        raise NoCall
    number = f"{bare[1]}{bare[2] or 0}.{bare[3] or 0}"
    if not _JSON_NUMBER.fullmatch(number):
        raise NoCall
    return number


def _string(source: Source) -> Steps[str]:
    quote = yield from source.peek()
    if quote not in ("'", '"'):
        raise NoCall
    source.take()
    quotes = 1
    if (yield from source.peek()) == quote:
        source.take()
        if (yield from source.peek()) != quote:
            return ""
        source.take()
        quotes = 3
    text = yield from _characters(source, quote, quotes)
    try:  # two escapes that are one character together, as JSON writes it
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError as error:
        raise NoCall from error


def _characters(source: Source, quote: str, quotes: int) -> Steps[str]:
    plain = re.compile(rf"[^{quote}\\]++" if quotes == 3 else rf"[^{quote}\\\n]++")
    pieces: list[str] = []
    seen = 0  # quotes in a row
    while seen < quotes:
        if piece := source.run(plain):
            pieces.append(piece)
            seen = 0
            continue
        character = yield from source.peek()
        if character == quote:
            seen += 1
            pieces.append(source.take())
        elif character == "\\":
            pieces.append((yield from _escape(source)))
            seen = 0
        elif not plain.match(character):
            raise NoCall
    return "".join(pieces[:-quotes])


def _escape(source: Source) -> Steps[str]:
    source.take()
    character = yield from source.peek()
    if not character or character == "N":
        raise NoCall
    if character in _OCTAL:
        return chr(int((yield from _digits(source, 3, _OCTAL)), 8))
    source.take()
    if character not in _DIGITS_OF:
        return _ESCAPED.get(character, "\\" + character)  # as Python has it
    digits = yield from _digits(source, _DIGITS_OF[character], _HEX)
    if len(digits) < _DIGITS_OF[character] or int(digits, 16) > 0x10FFFF:
        raise NoCall
    return chr(int(digits, 16))


def _digits(source: Source, most: int, of: frozenset[str]) -> Steps[str]:
    digits = ""
    while len(digits) < most and (yield from source.peek()) in of:
        digits += source.take()
    return digits
