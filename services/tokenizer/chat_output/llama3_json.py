"""{"name": "f", "parameters": {...}}; {...}: Llama 3.1 to 3.3, and models like them.

The answer begins so, or with <|python_tag|> in front, which may also come later. Without the tag
only a tool of the request is called, by an object that has nothing but a call's members.
"""

from triptych.services.tokenizer.chat_output.json_call import json_call
from triptych.services.tokenizer.chat_output.reading import Reading
from triptych.services.tokenizer.chat_output.source import Steps

TAG = "<|python_tag|>"
SEPARATOR = ";"


def read_llama3_json(reading: Reading) -> Steps[None]:
    """The whole text behind the reasoning."""
    source = reading.source
    source.hold()
    yield from source.spaces()
    if (yield from source.peek()) == "{":
        yield from reading.attempt(_calls(reading, untagged=True))
    else:
        source.rewind()
    while (yield from reading.text_until((TAG,))):
        yield from reading.attempt(_calls(reading, untagged=False))


def _calls(reading: Reading, *, untagged: bool) -> Steps[None]:
    source = reading.source
    while True:
        yield from source.spaces()
        yield from json_call(reading, untagged=untagged)
        source.hold()
        yield from source.spaces()
        if (yield from source.peek()) != SEPARATOR:
            break
        source.take()
        yield from source.spaces()
        if not (yield from source.peek()):
            break
    if (yield from source.peek()):
        source.rewind()
    else:
        source.release()
