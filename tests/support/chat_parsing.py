"""Chat parsers over texts that are cut in every way."""

import itertools
from collections.abc import Iterable, Sequence

from triptych.services.tokenizer.chat_output import (
    Answer,
    Delta,
    ToolSpec,
    joined,
    new_parser,
)

DECLARED = ("f", "g", "get_weather")
CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEP = (
    f"<\uff5c{name}\uff5c>"
    for name in (
        "tool\u2581calls\u2581begin", "tool\u2581calls\u2581end", "tool\u2581call\u2581begin",
        "tool\u2581call\u2581end", "tool\u2581sep",
    )
)  # fmt: skip
"""DeepSeek's tags."""


def deltas_of(
    pieces: Iterable[str],
    tools_parser: str | None,
    reasoning_parser: str | None = None,
    *,
    declared: Sequence[str] = DECLARED,
    prompt_tail: str = "",
    continued: str = "",
) -> tuple[list[list[Delta]], bool]:
    """What each push gave, then what the end gave; and whether calls were delivered whole."""
    ids = itertools.count()
    parser = new_parser(
        tools_parser,
        reasoning_parser,
        [ToolSpec(name) for name in declared],
        hex_digits=lambda: f"{next(ids):024x}",
        prompt_tail=prompt_tail,
        continued=continued,
    )
    deltas = [parser.push(piece) for piece in pieces]
    return [*deltas, parser.finish()], parser.called


def answer_of(
    text: str | Sequence[str],
    tools_parser: str | None,
    reasoning_parser: str | None = None,
    *,
    prompt_tail: str = "",
    continued: str = "",
) -> tuple[Answer, bool]:
    """The whole answer to a text, in one piece or in these."""
    pieces = [text] if isinstance(text, str) else text
    deltas, called = deltas_of(
        pieces, tools_parser, reasoning_parser, prompt_tail=prompt_tail, continued=continued
    )
    return joined(itertools.chain.from_iterable(deltas)), called


def cut(text: str, size: int) -> list[str]:
    """Pieces of this many characters."""
    return [text[at : at + size] for at in range(0, len(text), size)]


def fenced(name: str, arguments: str) -> str:
    """One call of DeepSeek V3."""
    return f"{CALL_BEGIN}function{SEP}{name}\n```json\n{arguments}\n```{CALL_END}"


def plain(name: str, arguments: str) -> str:
    """One call of DeepSeek V3.1."""
    return f"{CALL_BEGIN}{name}{SEP}{arguments}{CALL_END}"
