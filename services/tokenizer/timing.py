"""When what happened to a request, for the histograms of /metrics; whichever door it came by."""

import time
from typing import Protocol

from triptych.services.tokenizer.pieces import Piece


class Observer(Protocol):
    """Where the figures go. Times in seconds."""

    def first_token(self, seconds: float) -> None:
        """Since the request came in."""

    def between_tokens(self, seconds: float, tokens: int) -> None:
        """`tokens` tokens of a choice came, each `seconds` after the one before."""

    def ended(self, seconds: float, prompt_tokens: int, completion_tokens: int) -> None:
        """The whole request, all its choices."""

    def finished(self, reason: int) -> None:
        """A choice ended, with a FinishReason of the wire."""


class RequestTimes:
    """The clock of one request. `arrived`: time.monotonic() when it came in."""

    def __init__(self, observer: Observer, arrived: float) -> None:
        self._observer = observer
        self._arrived = arrived
        self._last: dict[int, float] = {}

    def note(self, piece: Piece) -> None:
        """A piece is on its way to the client."""
        now = time.monotonic()
        if piece.new_tokens:
            last = self._last.get(piece.index)
            if last is None:
                self._observer.first_token(now - self._arrived)
            else:
                self._observer.between_tokens((now - last) / piece.new_tokens, piece.new_tokens)
            self._last[piece.index] = now
        if piece.finish is not None:
            self._observer.finished(piece.finish_reason)
        if piece.usage is not None:
            usage = piece.usage
            self._observer.ended(now - self._arrived, usage.prompt_tokens, usage.completion_tokens)
