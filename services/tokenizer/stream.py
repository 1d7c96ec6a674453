"""One request's output: token ids in from the scheduler, pieces of the answer out to the client.

    token id -> detokenizer -> stop strings -> pending piece -> `take()`

Tokens are turned into text as they arrive, not when the client reads: a stop string ends the work
at once, however slow the reader is. A sequence ends exactly once: `take()` gives one piece with a
finish reason, or raises one error.

Every sampled token counts and is delivered as an id: the one that completed a stop string and the
end-of-sequence or stop token too, whose own text is not part of the output. What was sampled behind
the end of a stop string is dropped, uncounted.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from triptych.engine_core.errors import RequestError, SlowReader
from triptych.engine_core.step import FinishReason
from triptych.services.tokenizer.detokenizer import IncrementalDetokenizer
from triptych.services.tokenizer.stop_strings import StopStrings
from triptych.services.tokenizer.validation import OutputParams


@dataclass(slots=True)
class Piece:
    """What came since the last piece. `finish` and `completion_tokens` are set on the last one."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    completion_tokens: int = 0
    stop_string: str | None = None
    stop_token_id: int | None = None


class OutputStream:
    """A TokenSink. `on_wake` is called once per drain that brought something; event loop only."""

    def __init__(
        self,
        params: OutputParams,
        detokenizer: IncrementalDetokenizer,
        on_wake: Callable[[], None] | None = None,
    ) -> None:
        self._params = params
        self._detokenizer = detokenizer
        self._stop_strings = StopStrings(params.stop, include_in_output=params.include_stop)
        self._woken = asyncio.Event()
        self._on_wake = on_wake or self._woken.set
        self._pending = Piece()
        self._error: RequestError | None = None
        self._ended = False
        self._told = False  # the reader knows of what is pending: what one drain brings is not late
        self.completion_tokens = 0
        """Sampled tokens that count, delivered or not."""

    @property
    def ended(self) -> bool:
        """Whether no token or error can follow."""
        return self._ended

    # ----------------------------------------------------------------------- from the scheduler

    def accept(self, token_id: int, finish: int) -> bool:
        """Take the next token. True when the scheduler need not go on: it is to be aborted."""
        if self._ended:
            return True
        self.completion_tokens += 1
        self._pending.token_ids.append(token_id)
        if finish == FinishReason.STOP:
            self._finish(FinishReason.STOP, stop_token_id=token_id)
            return False
        if self._add(self._detokenizer.push((token_id,))):
            return True
        if finish:
            self._finish(FinishReason(finish))
        elif self._told and len(self._pending.token_ids) > self._params.max_unread_tokens:
            self.fail(
                SlowReader(
                    f"more than {self._params.max_unread_tokens} tokens wait for their reader"
                )
            )
            return True
        return False

    def fail(self, error: RequestError) -> None:
        """End with an error. What is pending is dropped: a client must not take it for whole."""
        if not self._ended:
            self._ended, self._error = True, error
            self._pending = Piece()

    def wake(self) -> None:
        """Tell the reader that something came."""
        self._told = True
        self._on_wake()

    def cancel(self) -> None:
        """End as the client wished, with what there is."""
        if not self._ended:
            self._finish(FinishReason.ABORT)

    def _add(self, text: str) -> bool:
        """Whether a stop string ended the output with this text."""
        armed = self.completion_tokens >= self._params.min_tokens
        released = self._stop_strings.push(text, armed=armed)
        self._pending.text += released.text
        if released.stop is None:
            return False
        self._pending.stop_string = released.stop
        self._end(FinishReason.STOP)
        return True

    def _finish(self, reason: FinishReason, stop_token_id: int | None = None) -> None:
        """No token follows: what was held back is text now, and may complete a stop string."""
        if self._add(self._detokenizer.finish()):
            return
        self._pending.text += self._stop_strings.finish()
        if stop_token_id in self._params.stop_token_ids:
            self._pending.stop_token_id = stop_token_id
        self._end(reason)

    def _end(self, reason: FinishReason) -> None:
        self._ended = True
        self._pending.finish = reason
        self._pending.completion_tokens = self.completion_tokens

    # ---------------------------------------------------------------------------- to the client

    def take(self) -> Piece | None:
        """What came since the last call; None when it is nothing that the client asked for.

        Raises the error that ended the request.
        """
        self._told = False
        if self._error is not None:
            raise self._error
        piece, params = self._pending, self._params
        wanted = (piece.text and params.text) or (piece.token_ids and params.token_ids)
        if not wanted and piece.finish is None:
            piece.token_ids.clear()  # their text is held back; nobody wants the ids
            return None
        self._pending = Piece()
        return piece

    async def next(self) -> Piece:
        """Wait for the next piece. Raises the error that ended the request."""
        while True:
            self._woken.clear()
            piece = self.take()
            if piece is not None:
                return piece
            await self._woken.wait()
