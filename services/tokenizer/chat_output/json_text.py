"""JSON values as text. Tracks strings, escapes and nesting; knows no more of JSON."""

import json
import re
from collections.abc import Callable

from triptych.services.tokenizer.chat_output.source import NoCall, Source, Steps

_SCALAR = re.compile(r"[-+.0-9A-Za-z]++")
_BETWEEN = re.compile(r"[-+.0-9A-Za-z,: \t\r\n]++")
_IN_STRING = re.compile(r'[^"\\]++')
_CLOSES = {"{": "}", "[": "]"}


def json_nested(source: Source, take: Callable[[str], None]) -> Steps[bool]:
    """Read the object or array that begins here, and hand on its text as it comes.

    False where the text ends in it, or in front of a character that cannot stand there.
    """
    open_ends: list[str] = []
    while True:
        take(source.run(_BETWEEN)) if open_ends else None
        character = yield from source.peek()
        if character in _CLOSES:
            open_ends.append(_CLOSES[character])
            take(source.take())
        elif character == '"':
            if not (yield from json_string(source, take)):
                return False
        elif character and character == open_ends[-1]:
            open_ends.pop()
            take(source.take())
            if not open_ends:
                return True
        elif not _BETWEEN.match(character):
            return False


def json_string(source: Source, take: Callable[[str], None]) -> Steps[bool]:
    """The same for a string."""
    take(source.take())
    while True:
        take(source.run(_IN_STRING))
        character = yield from source.peek()
        if not character:
            return False
        if character == '"':
            take(source.take())
            return True
        if character == "\\":
            take(source.take())
            if not (yield from source.peek()):
                return False
            take(source.take())


def whole_value(source: Source) -> Steps[str]:
    """Read the value that begins here; its text. Raises NoCall."""
    pieces: list[str] = []
    character = yield from source.peek()
    if character in _CLOSES:
        ended = yield from json_nested(source, pieces.append)
    elif character == '"':
        ended = yield from json_string(source, pieces.append)
    else:
        pieces.append((yield from source.whole_run(_SCALAR)))
        ended = bool(pieces[0])
    if not ended:
        raise NoCall
    return "".join(pieces)


def text_of_string(text: str) -> str:
    """What a string says. Raises NoCall for what is not one, or has half a surrogate pair."""
    try:
        value = json.loads(text, strict=False)
        if isinstance(value, str):
            value.encode()
            return value
    except (ValueError, RecursionError) as error:
        raise NoCall from error
    raise NoCall
