"""The text of an answer as it comes, read by parsers that are written as if it were all there.

A parser is a generator: where it needs a character that has not come yet, it yields, and goes on
when more was fed. Whatever it decides it decides by characters, never by where a piece ended, so
that how the text is cut cannot change the result. This is why the parsers here read by hand and
not with a library: those for streamed JSON (ijson, jiter, partial-json-parser) return values, and
what is passed on is the text of the arguments as the model wrote it.
"""

import re
from collections.abc import Generator, Sequence
from typing import TypeAlias, TypeVar

_Result = TypeVar("_Result")
Steps: TypeAlias = Generator[None, None, _Result]
"""Yields where more text is needed; returns its result."""

SPACE = " \t\r\n"
_SPACES = re.compile(f"[{SPACE}]++")


class NoCall(Exception):
    """What was read since `Source.hold` is not a call after all: it is text."""


class Source:
    """Text that is read once. What is read while it is held can be had back, or be read again.

    Costs one step per character, however the text is cut and however much of it is held.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._held: list[str] | None = None

    def feed(self, text: str) -> None:
        """The next piece of the text. What came before has been read up to its end."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """Nothing more will come."""
        self._ended = True

    @property
    def all_read(self) -> bool:
        """Whether all that has come is read."""
        return self._at == len(self._text)

    def peek(self) -> Steps[str]:
        """The next character; "" at the end of the text."""
        while self._at == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def run(self, pattern: re.Pattern[str]) -> str:
        """Read what matches here, of the text that has come; it may go on in the next piece."""
        found = pattern.match(self._text, self._at)
        return self._read(found.end()) if found else ""

    def take(self) -> str:
        """Read the character that `peek` showed."""
        return self._read(self._at + 1)

    def spaces(self) -> Steps[None]:
        """Read all white space that stands here."""
        yield from self.whole_run(_SPACES)

    def whole_run(self, pattern: re.Pattern[str], most: int | None = None) -> Steps[str]:
        """Read all that matches here. `pattern`: one or more characters of a class.

        Raises NoCall where it is longer than `most`.
        """
        pieces: list[str] = []
        length = 0
        while (yield from self.peek()) and (piece := self.run(pattern)):
            length += len(piece)
            if most is not None and length > most:
                raise NoCall
            pieces.append(piece)
        return "".join(pieces)

    def match(self, tags: Sequence[str]) -> Steps[str]:
        """Read the tag that stands here; "" where none does: what may have been one is read then.

        No tag may be the beginning of another.
        """
        read = ""
        while read not in tags:
            character = yield from self.peek()
            if not character or not any(tag.startswith(read + character) for tag in tags):
                return ""
            read += self.take()
        return read

    def expect(self, text: str) -> Steps[None]:
        """Read exactly this. Raises NoCall where something else stands here."""
        if not (yield from self.match((text,))):
            raise NoCall

    def hold(self) -> None:
        """Keep what is read from here on. Nothing may be held already."""
        if self._held is not None:
            raise AssertionError("held already")
        self._held = []

    def release(self) -> str:
        """No longer; what was read while it was held."""
        held, self._held = self._held, None
        if held is None:
            raise AssertionError("nothing is held")
        return "".join(held)

    def rewind(self) -> None:
        """No longer; what was read while it was held is read again."""
        self._text = self.release() + self._text[self._at :]
        self._at = 0

    def _read(self, end: int) -> str:
        text = self._text[self._at : end]
        self._at = end
        if self._held is not None:
            self._held.append(text)
        return text
