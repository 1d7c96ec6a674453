"""[f(a=1, b="x"), g()]: Llama 3.2 and 4, ToolACE and others that call in Python's notation.

The answer begins so, or with <|python_start|> in front, which may also come later; only a tool of
the request is called. A call is passed on when it is whole: its arguments are not JSON before.
"""

import re

from triptych.services.tokenizer.chat_output.python_literal import keyword_arguments
from triptych.services.tokenizer.chat_output.reading import MAX_NAME, Reading
from triptych.services.tokenizer.chat_output.source import NoCall, Steps

BEGIN = "<|python_start|>"
END = "<|python_end|>"

_NAME = re.compile(r"[A-Za-z0-9_.\-]++")


def read_pythonic(reading: Reading) -> Steps[None]:
    """The whole text behind the reasoning."""
    source = reading.source
    source.hold()
    yield from source.spaces()
    if (yield from source.peek()) == "[":
        yield from reading.attempt(_list(reading))
    else:
        source.rewind()
    while (yield from reading.text_until((BEGIN,))):
        if (yield from reading.attempt(_list(reading))):
            yield from reading.closing(END)


def _list(reading: Reading) -> Steps[None]:
    source, output = reading.source, reading.output
    yield from source.spaces()
    yield from source.expect("[")
    separator = ","
    while separator == ",":
        yield from source.spaces()
        name = yield from source.whole_run(_NAME, MAX_NAME)
        if name not in reading.declared:
            raise NoCall
        yield from source.spaces()
        yield from source.expect("(")
        arguments = yield from keyword_arguments(source)
        reading.open(name)
        output.arguments(arguments)
        output.close()
        source.hold()
        yield from source.spaces()
        separator = yield from source.match((",", "]"))
        if separator or not (yield from source.peek()):
            source.release()
        else:
            source.rewind()
        if separator == ",":
            source.hold()
