"""An answer's text to reasoning, content and calls, as it comes."""

import re
from collections.abc import Callable, Sequence
from typing import Protocol

from triptych.services.tokenizer.chat_output.deltas import Content, Delta
from triptych.services.tokenizer.chat_output.notations import Notation, notation_named, style_named
from triptych.services.tokenizer.chat_output.output import Output
from triptych.services.tokenizer.chat_output.reading import Reading
from triptych.services.tokenizer.chat_output.reasoning import (
    Thinking,
    ThoughtStyle,
    read_thought,
    thinking_at,
)
from triptych.services.tokenizer.chat_output.source import Source, Steps
from triptych.services.tokenizer.chat_output.tools import ToolSpec

_ANYTHING = re.compile(".++", re.DOTALL)


class ChatParser(Protocol):
    """One choice of one answer."""

    @property
    def called(self) -> bool:
        """Whether calls were delivered, all of them complete."""
        ...

    def push(self, text: str) -> list[Delta]:
        """Take the next piece of the text, of any size; what is certain now."""
        ...

    def finish(self) -> list[Delta]:
        """The text has ended, for whatever reason; what was held back. Nothing comes after it."""
        ...


def new_parser(
    tools_parser: str | None,
    reasoning_parser: str | None,
    tools: Sequence[ToolSpec] = (),
    *,
    hex_digits: Callable[[], str],
    prompt_tail: str = "",
    continued: str = "",
) -> ChatParser:
    """The parser of one choice.

    `hex_digits` gives 24 hexadecimal digits for each call's id. `prompt_tail`: the last characters
    of the prompt as text, 64 are enough: whether the template has opened a thought. `continued`:
    the text of the last message, where the answer goes on with it. Raises ValueError for a parser
    that there is not.
    """
    if tools_parser is None and reasoning_parser is None:
        return _AllContent()
    style = None if reasoning_parser is None else style_named(reasoning_parser)
    inside = ""
    if style is not None:
        thinking, end = thinking_at(style, prompt_tail, continued)
        inside = end if thinking is Thinking.INSIDE else ""
    return _Parser(tools_parser, style, inside, tools, hex_digits)


class _AllContent:
    called = False

    def push(self, text: str) -> list[Delta]:
        return [Content(text)] if text else []

    def finish(self) -> list[Delta]:
        return []


class _Parser:
    def __init__(
        self,
        tools_parser: str | None,
        style: ThoughtStyle | None,
        inside: str,
        tools: Sequence[ToolSpec],
        hex_digits: Callable[[], str],
    ) -> None:
        notation = _NO_CALLS if tools_parser is None else notation_named(tools_parser)
        self._source = Source()
        self._output = Output(lambda: notation.id_form(hex_digits()))
        reading = Reading(self._source, self._output, frozenset(each.name for each in tools))
        self._steps = _read_answer(reading, notation, style, inside)
        next(self._steps)

    @property
    def called(self) -> bool:
        return self._output.called

    def push(self, text: str) -> list[Delta]:
        if not text:
            return []
        self._source.feed(text)
        next(self._steps)
        return self._output.drain()

    def finish(self) -> list[Delta]:
        self._source.end()
        next(self._steps, None)
        return self._output.drain()


def _read_answer(
    reading: Reading,
    notation: Notation,
    style: ThoughtStyle | None,
    inside: str,
) -> Steps[None]:
    if style is not None:
        yield from read_thought(reading, style, inside)
    yield from notation.read(reading)


def _read_content(reading: Reading) -> Steps[None]:
    while (yield from reading.source.peek()):
        reading.output.content(reading.source.run(_ANYTHING))


_NO_CALLS = Notation(_read_content, frozenset())
