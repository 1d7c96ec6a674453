"""JSON text from outside, with bounds on its size and depth that hold before it is parsed."""

import json
import re
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"

_MAX_DIGITS = 400  # more than any float64 has before its point
# A string that does not end is one match, too: no second look at the rest of the text.
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)


class NoJson(ValueError):
    """Why a text is not taken, in words that follow the name of its field."""


@dataclass(frozen=True, slots=True)
class JsonBounds:
    """`depth`: arrays and objects in one another."""

    most_bytes: int
    depth: int


def read_json(text: str, bounds: JsonBounds) -> Json:
    """The value of a text. Raises NoJson. Of a name that stands twice, the last counts."""
    size = len(text.encode(errors="surrogatepass"))
    if size > bounds.most_bytes:
        raise NoJson(f"{size} bytes, more than {bounds.most_bytes}")
    _check_depth(text, bounds.depth)
    try:
        value: Json = json.loads(text, parse_constant=_no_constant, parse_int=_int)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except json.JSONDecodeError as error:
        raise NoJson(
            f"it is no JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from error
    except UnicodeEncodeError as error:
        raise NoJson("it has half of a surrogate pair, which is no character") from error
    except NoJson:
        raise
    except ValueError as error:  # of the second: an infinite number
        raise NoJson("a number in it is too large") from error
    return value


def _check_depth(text: str, most: int) -> None:
    """Before the parser, whose recursion would end in an error that says nothing of depth."""
    depth = 0
    for token in _STRING_OR_BRACKET.finditer(text):
        if token[0] in "[{":
            depth += 1
            if depth > most:
                raise NoJson(f"more than {most} arrays and objects in one another")
        elif token[0] in "]}":
            depth -= 1


def _no_constant(name: str) -> NoReturn:
    raise NoJson(f"{name} is no number of JSON")


def _int(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise NoJson("a number in it is too large")
    return int(text)
