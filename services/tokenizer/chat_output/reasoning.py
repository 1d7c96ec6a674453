"""Thoughts in front of an answer: <think>...</think> and the like.

White space around a thought's tags belongs to them. A thought that never ends is all there is of
the answer. Behind the thought, tags are text: an answer may be about them. Calls in a thought are
thoughts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from triptych.services.tokenizer.chat_output.reading import Reading, plain_text
from triptych.services.tokenizer.chat_output.source import SPACE, Steps


@dataclass(frozen=True, slots=True)
class ThoughtStyle:
    """How a family of models thinks.

    `tags`: the end of each beginning; the first is what a template opens. `unopened`: answers
    begin within a thought, whether its tag is there or not, unless the prompt has ended it.
    """

    tags: Mapping[str, str] = field(default_factory=lambda: {"<think>": "</think>"})
    unopened: bool = False


class Thinking(Enum):
    """Where an answer begins."""

    INSIDE = auto()
    """In a thought."""
    POSSIBLE = auto()
    """In front of one, maybe."""
    OVER = auto()
    """Behind it."""


def thinking_at(style: ThoughtStyle, prompt_tail: str, continued: str) -> tuple[Thinking, str]:
    """Where the answer begins, and the tag that ends its thought if it is inside of one.

    `prompt_tail`: the end of the prompt's text, where the assistant's turn begins. `continued`:
    what the prompt has of that turn's text, if the model is to go on with it.
    """
    before = prompt_tail.removesuffix(continued).rstrip(SPACE)
    opened = next((end for start, end in style.tags.items() if before.endswith(start)), "")
    closed = any(before.endswith(end) for end in style.tags.values())
    if continued.strip(SPACE):
        places = [(continued.rfind(start), end) for start, end in style.tags.items()]
        last, end = max(places)
        if last < 0:
            last, end = -1, opened
        inside = bool(end) and continued.rfind(end) <= last
        return (Thinking.INSIDE if inside else Thinking.OVER), end
    if opened:
        return Thinking.INSIDE, opened
    if closed:
        return Thinking.OVER, ""
    if style.unopened:
        return Thinking.INSIDE, next(iter(style.tags.values()))
    return Thinking.POSSIBLE, ""


def read_thought(reading: Reading, style: ThoughtStyle, inside: str) -> Steps[None]:
    """Pass on a thought, if the text begins with one. `inside`: the tag that ends the thought in
    which it begins, "" where that needs a tag."""
    source = reading.source
    source.hold()
    yield from source.spaces()
    start = yield from source.match(tuple(style.tags))
    if start:
        source.release()
        yield from source.spaces()
    else:
        source.rewind()
        if not inside:
            return
        yield from source.spaces()
    end = style.tags.get(start, inside)
    plain = plain_text((end,))
    while True:
        reading.output.reasoning(source.run(plain))
        if source.all_read:
            if not (yield from source.peek()):
                return
            continue
        source.hold()
        yield from source.spaces()
        ended = yield from source.match((end,))
        text = source.release()
        if ended:
            yield from source.spaces()
            return
        reading.output.reasoning(text)
