"""JSON as the standard has it (RFC 8259), and stricter: what two readers would read differently is
refused."""

import json
import math
import re
from typing import NoReturn, TypeAlias

from triptych.services.tokenizer.structured_output.refusal import Refused, shown

MAX_JSON_BYTES = 256 << 10
MAX_JSON_DEPTH = 96
"""Arrays and objects in one another. llguidance's reader ends at 128, its own wrapping included."""
_MAX_DIGITS = 400  # more than any float64 has before its point

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"

_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)


def parse_json(text: str) -> Json:
    """The value of a text. Raises Refused: no JSON, a name twice, NaN, too large or too deep."""
    size = len(text.encode())
    if size > MAX_JSON_BYTES:
        raise Refused(f"{size} bytes, more than {MAX_JSON_BYTES}")
    if not text.strip():
        raise Refused("it is empty")
    _check_depth(text)
    try:
        value, end = _DECODER.raw_decode(text.strip())
        if end != len(text.strip()):
            raise json.JSONDecodeError("something follows", text.strip(), end)
    except json.JSONDecodeError as error:
        raise Refused(
            f"it is no JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from error
    return _whole(value)


def parse_json_within(text: str, start: int) -> tuple[Json, int]:
    """The value that begins at `start` in a longer text, and where it ends. Raises Refused."""
    beginning = re.compile(r"\s*").match(text, start)
    position = beginning.end() if beginning else start
    _check_depth(text[position : position + MAX_JSON_BYTES])
    try:
        value, end = _DECODER.raw_decode(text, position)
    except json.JSONDecodeError as error:
        raise Refused(
            f"it is no JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from error
    return _whole(value), end


def written_json(value: Json) -> str:
    """The shortest text of a value; names keep their order."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _whole(value: Json) -> Json:
    try:
        written_json(value).encode()
    except UnicodeEncodeError as error:
        raise Refused("it has half of a surrogate pair, which is no character") from error
    return value


def _check_depth(text: str) -> None:
    """Before the parser, whose recursion would end in an error that says nothing of depth."""
    depth = 0
    for token in _STRING_OR_BRACKET.finditer(text):
        match token[0]:
            case "[" | "{":
                depth += 1
                if depth > MAX_JSON_DEPTH:
                    raise Refused(f"more than {MAX_JSON_DEPTH} arrays and objects in one another")
            case "]" | "}":
                depth -= 1


def _object(pairs: list[tuple[str, Json]]) -> Json:
    value: dict[str, Json] = {}
    for name, each in pairs:
        if name in value:
            raise Refused(f"the name {shown(repr(name))} stands twice in one object")
        value[name] = each
    return value


def _no_constant(name: str) -> NoReturn:
    raise Refused(f"{name} is no number of JSON")


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise Refused(f"the number {shown(text)} is too large")
    return value


def _int(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise Refused(f"the number {shown(text)} is too large")
    return int(text)


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_float, parse_int=_int
)
