"""Stop strings over a stream of text: what may be a part of one is held back until it is decided.

The rule, the same however the text is cut into pushes: reading character by character, the first
character that completes a stop string ends the text. Where it completes several at once, the
longest of them counts, since it begins earliest. Where stops begin together (`ab`, `abc`), the
shorter is complete first and wins. Knows nothing of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Released:
    """Text that is decided, and the stop string that ended it, if one did."""

    text: str
    stop: str | None = None


class StopStrings:
    """The state of one output. Costs one step per character and stop string, amortised."""

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        """Raises ValueError for an empty stop string; the request's validation refuses it first."""
        self._matchers = [_Matcher(stop) for stop in dict.fromkeys(stops)]
        self._include = include_in_output
        self._held = ""
        self._stopped = False

    def push(self, text: str, *, armed: bool = True) -> Released:
        """Take the next piece of text; returns what is decided now.

        With `armed` false (before `min_tokens`) a stop string that is completed by this text stays
        in the output and is forgotten; one that it only begins may still be completed later.
        After a stop, everything is swallowed.
        """
        if self._stopped:
            return Released("")
        if not self._matchers:
            return Released(text)
        before = len(self._held)
        buffer = self._held + text
        for at, character in enumerate(text, start=before + 1):
            stop = self._completed(character)
            if stop and armed:
                self._stopped = True
                self._held = ""
                return Released(buffer[: at if self._include else at - len(stop)], stop)
        # With the stop string left in, nothing that was sent ever has to be taken back.
        undecided = 0 if self._include else max(each.matched for each in self._matchers)
        cut = len(buffer) - undecided
        self._held = buffer[cut:]
        return Released(buffer[:cut])

    def finish(self) -> str:
        """The output ended otherwise: what was held back is text after all."""
        held, self._held = self._held, ""
        return held

    def _completed(self, character: str) -> str:
        longest = ""
        for matcher in self._matchers:
            if matcher.step(character) and len(matcher.stop) > len(longest):
                longest = matcher.stop
        return longest


class _Matcher:
    """Knuth-Morris-Pratt for one string; `matched` characters of it end the text read so far."""

    __slots__ = ("_fallback", "matched", "stop")

    def __init__(self, stop: str) -> None:
        if not stop:
            raise ValueError("a stop string is empty")
        self.stop = stop
        self.matched = 0
        self._fallback = _fallbacks(stop)

    def step(self, character: str) -> bool:
        """Whether this character completes the string. `matched` then may begin the next."""
        matched = self.matched
        while matched and self.stop[matched] != character:
            matched = self._fallback[matched - 1]
        if self.stop[matched] == character:
            matched += 1
        complete = matched == len(self.stop)
        self.matched = self._fallback[matched - 1] if complete else matched
        return complete


def _fallbacks(text: str) -> list[int]:
    """For each prefix, the length of the longest shorter prefix that also ends it."""
    lengths = [0] * len(text)
    matched = 0
    for at in range(1, len(text)):
        while matched and text[matched] != text[at]:
            matched = lengths[matched - 1]
        if text[matched] == text[at]:
            matched += 1
        lengths[at] = matched
    return lengths
