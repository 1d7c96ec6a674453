"""The calls of DeepSeek V3 and R1, and those of V3.1, which have neither the kind nor the fence.

    <|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>f
    ```json
    {...}
    ```<|tool_call_end|><|tool_calls_end|>

    <|tool_calls_begin|><|tool_call_begin|>f<|tool_sep|>{...}<|tool_call_end|><|tool_calls_end|>

The tags are spelled with characters of their own for the bars and between the words.
"""

from triptych.services.tokenizer.chat_output.reading import MAX_NAME, NAME, Reading
from triptych.services.tokenizer.chat_output.source import NoCall, Steps


def _tag(words: str) -> str:
    return "<\uff5c{}\uff5c>".format(words.replace(" ", "\u2581"))


CALLS_BEGIN = _tag("tool calls begin")
CALLS_END = _tag("tool calls end")
CALL_BEGIN = _tag("tool call begin")
CALL_END = _tag("tool call end")
SEPARATOR = _tag("tool sep")
KIND = "function"
FENCE_BEGIN = "```json"
FENCE_END = "```"


def read_deepseek_v3(reading: Reading) -> Steps[None]:
    """The whole text behind the reasoning."""
    while tag := (yield from reading.text_until((CALLS_BEGIN, CALL_BEGIN))):
        if (yield from reading.attempt(_call(reading, begun=tag == CALL_BEGIN))):
            yield from reading.closing(FENCE_END)
            yield from reading.closing(CALL_END)
            yield from reading.closing(CALLS_END)


def _call(reading: Reading, *, begun: bool) -> Steps[None]:
    source = reading.source
    yield from source.spaces()
    if not begun:
        yield from source.expect(CALL_BEGIN)
        yield from source.spaces()
    name = yield from source.whole_run(NAME, MAX_NAME)
    yield from source.expect(SEPARATOR)
    yield from source.spaces()
    if name == KIND and (yield from source.peek()) != "{":
        name = yield from source.whole_run(NAME, MAX_NAME)
        yield from source.spaces()
        yield from source.expect(FENCE_BEGIN)
        yield from source.spaces()
    if not name:
        raise NoCall
    yield from reading.arguments(name)
