"""A choice that is handed on when it has ended: a hypothesis of a beam search."""

from collections.abc import Sequence

from triptych.engine_core.errors import RequestError
from triptych.services.tokenizer.token_sink import TokenSink
from triptych.services.transport.step_outputs import TokenLogprobs


class WholeChoice:
    """A TokenSink before another one. A search that another scheduler begins anew finds it again:
    nothing of it must have been seen before."""

    def __init__(self, sink: TokenSink) -> None:
        self._sink = sink
        self._tokens: list[tuple[int, int, TokenLogprobs | None]] = []
        self._score: float | None = None
        self._ended = False

    def started(self, cached_tokens: int) -> None:
        """See TokenSink."""
        self._sink.started(cached_tokens)

    def prompt_logprobs(self, position: int, rows: Sequence[TokenLogprobs]) -> None:
        """See TokenSink."""
        self._sink.prompt_logprobs(position, rows)

    def scored(self, score: float) -> None:
        """See TokenSink."""
        self._score = score

    def accept(self, token_id: int, finish: int, logprobs: TokenLogprobs | None) -> bool:
        """Hand all tokens on with the last one."""
        self._tokens.append((token_id, finish, logprobs))
        if not finish:
            return False
        self._ended = True
        *tokens, last = self._tokens
        for token in tokens:
            if self._sink.accept(*token):
                return True
        if self._score is not None:
            self._sink.scored(self._score)
        return self._sink.accept(*last)

    def fail(self, error: RequestError) -> None:
        """See TokenSink."""
        self._ended = True
        self._sink.fail(error)

    def wake(self) -> None:
        """Of what has been handed on."""
        if self._ended:
            self._sink.wake()

    def begin_again(self) -> None:
        """Forget what came."""
        self._tokens.clear()
        self._score = None
