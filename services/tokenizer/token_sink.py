"""What the connection to the scheduler hands tokens to."""

from collections.abc import Sequence
from typing import Protocol

from triptych.engine_core.errors import RequestError
from triptych.services.transport.step_outputs import TokenLogprobs


class TokenSink(Protocol):
    """Where one choice's tokens go."""

    def started(self, cached_tokens: int) -> None:
        """The first token follows; so many tokens of the prompt were found in the cache."""

    def prompt_logprobs(self, position: int, rows: Sequence[TokenLogprobs]) -> None:
        """Of the prompt's tokens from `position` on. Raises InvalidRequest where there are none."""

    def scored(self, score: float) -> None:
        """The score of the beam hypothesis whose last token follows."""

    def accept(self, token_id: int, finish: int, logprobs: TokenLogprobs | None) -> bool:
        """Take the next token; `finish` is a FinishReason or 0. True: send no more, abort it."""

    def fail(self, error: RequestError) -> None:
        """The choice ended with an error; nothing follows."""

    def wake(self) -> None:
        """Everything that came in this drain has been handed over."""
