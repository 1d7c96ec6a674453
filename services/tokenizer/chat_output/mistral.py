"""[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...] of Mistral's tokenizers up to version 7, and
[TOOL_CALLS]f[ARGS]{...}[TOOL_CALLS]g[ARGS]{...} of those since version 11.

The newer may have [CALL_ID] and an id of the model's own between name and arguments, or no [ARGS].
"""

import re

from triptych.services.tokenizer.chat_output.json_call import json_call
from triptych.services.tokenizer.chat_output.reading import MAX_NAME, NAME, Reading
from triptych.services.tokenizer.chat_output.source import NoCall, Steps

TAG = "[TOOL_CALLS]"
ARGUMENTS = "[ARGS]"
CALL_ID = "[CALL_ID]"

_ID = re.compile(r"[A-Za-z0-9_\-]++")


def read_mistral(reading: Reading) -> Steps[None]:
    """The whole text behind the reasoning."""
    while (yield from reading.text_until((TAG,))):
        yield from reading.attempt(_calls(reading))


def _calls(reading: Reading) -> Steps[None]:
    yield from reading.source.spaces()
    match (yield from reading.source.peek()):
        case "[":
            yield from _array(reading)
        case "{":
            yield from json_call(reading)
        case _:
            yield from _named(reading)


def _array(reading: Reading) -> Steps[None]:
    source = reading.source
    source.take()
    separator = ","
    while separator == ",":
        yield from source.spaces()
        yield from json_call(reading)
        source.hold()
        yield from source.spaces()
        separator = yield from source.match((",", "]"))
        if separator or not (yield from source.peek()):
            source.release()
        else:
            source.rewind()
        if separator == ",":
            source.hold()


def _named(reading: Reading) -> Steps[None]:
    source = reading.source
    name = yield from source.whole_run(NAME, MAX_NAME)
    if not name:
        raise NoCall
    if (yield from source.peek()) == "[":
        tag = yield from source.match((CALL_ID, ARGUMENTS))
        if tag == CALL_ID:
            yield from source.whole_run(_ID, MAX_NAME)
            yield from source.expect(ARGUMENTS)
        elif not tag:
            raise NoCall
    yield from source.spaces()
    yield from reading.arguments(name)
