"""<tool_call>{"name": "f", "arguments": {...}}</tool_call>: Hermes, Qwen 2.5 and 3."""

from triptych.services.tokenizer.chat_output.json_call import json_call
from triptych.services.tokenizer.chat_output.reading import Reading
from triptych.services.tokenizer.chat_output.source import Steps

BEGIN = "<tool_call>"
END = "</tool_call>"


def read_hermes(reading: Reading) -> Steps[None]:
    """The whole text behind the reasoning."""
    while (yield from reading.text_until((BEGIN,))):
        if (yield from reading.attempt(_call(reading))):
            yield from reading.closing(END)


def _call(reading: Reading) -> Steps[None]:
    yield from reading.source.spaces()
    yield from json_call(reading)
