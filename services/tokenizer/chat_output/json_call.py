"""A call as one JSON object: {"name": "f", "arguments": {...}}, as most models write it."""

import json
from collections.abc import Set as AbstractSet

from triptych.services.tokenizer.chat_output.json_text import text_of_string, whole_value
from triptych.services.tokenizer.chat_output.reading import MAX_NAME, NAME, Reading
from triptych.services.tokenizer.chat_output.source import NoCall, Steps

_ARGUMENTS = frozenset({"arguments", "parameters"})
UNTAGGED_MEMBERS = frozenset({"name", "type", "id", *_ARGUMENTS})
"""What a call has where no tag says that it is one: an answer in JSON has other members."""


def json_call(reading: Reading, *, untagged: bool = False) -> Steps[None]:
    """Read a call, which is held. `arguments` may be called `parameters`, stand in front of the
    name, be an object within a string, null or left out. Raises NoCall.
    """
    call = _JsonCall(reading, untagged=untagged)
    try:
        yield from call.read()
    except NoCall:
        if not call.announced:
            raise
        # Its arguments are complete, the object around them is not: content, unless just cut.
        rest = reading.source.release()
        if (yield from reading.source.peek()):
            reading.output.content(rest)


class _JsonCall:
    def __init__(self, reading: Reading, *, untagged: bool) -> None:
        self._reading = reading
        self._members: AbstractSet[str] = UNTAGGED_MEMBERS if untagged else frozenset()
        self._names: AbstractSet[str] = reading.declared if untagged else frozenset()
        self._name = ""
        self._arguments = ""
        self.announced = False

    def read(self) -> Steps[None]:
        source = self._reading.source
        yield from source.expect("{")
        separator = "{"
        while separator != "}":
            yield from source.spaces()
            if (yield from source.peek()) != "}":
                if not (yield from self._member()):
                    return
                yield from source.spaces()
            separator = yield from source.match((",", "}"))
            if not separator:
                raise NoCall
        if not self.announced:
            self._announce("{}")
        source.release()

    def _member(self) -> Steps[bool]:
        """Read one. False where the call's arguments broke off: nothing is held then."""
        source = self._reading.source
        member = text_of_string((yield from whole_value(source)))
        if self._members and member not in self._members:
            raise NoCall
        yield from source.spaces()
        yield from source.expect(":")
        yield from source.spaces()
        if member in _ARGUMENTS and self._name and not self._arguments:
            return (yield from self._stream_arguments())
        value = yield from whole_value(source)
        if member == "name" and not self._name:
            self._name = self._checked_name(text_of_string(value))
            if self._arguments:
                self._announce(self._arguments)
        elif member in _ARGUMENTS and not self._arguments:
            self._arguments = _object_text(value)
        return True

    def _stream_arguments(self) -> Steps[bool]:
        source = self._reading.source
        if (yield from source.peek()) != "{":
            self._announce(_object_text((yield from whole_value(source))))
            return True
        if not (yield from self._reading.arguments(self._name)):
            return False
        self._arguments, self.announced = "{", True
        source.hold()
        return True

    def _announce(self, arguments: str) -> None:
        if not self._name:
            raise NoCall
        self._reading.open(self._name)
        self._reading.output.arguments(arguments)
        self._reading.output.close()
        self._arguments, self.announced = arguments, True
        self._reading.source.hold()

    def _checked_name(self, name: str) -> str:
        if len(name) > MAX_NAME or not NAME.fullmatch(name):
            raise NoCall
        if self._names and name not in self._names:
            raise NoCall
        return name


def _object_text(value: str) -> str:
    """The arguments that a value stands for. Raises NoCall."""
    if value.startswith("{"):
        return value
    if value == "null":
        return "{}"
    text = text_of_string(value)
    try:
        if isinstance(json.loads(text), dict):
            return text
    except (ValueError, RecursionError) as error:
        raise NoCall from error
    raise NoCall
