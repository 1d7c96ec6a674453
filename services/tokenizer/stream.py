"""One choice's output: token ids in from the scheduler, pieces of the answer out to the client.

    token id -> detokenizer -> stop strings -> pending piece -> `take()`

Tokens are turned into text as they arrive, not when the client reads: a stop string ends the work
at once, however slow the reader is. A choice ends exactly once: `take()` gives one piece with a
finish reason, or raises one error.

Every sampled token counts and is delivered as an id, with its logprob if asked for: the one that
completed a stop string and the end-of-sequence or stop token too, whose own text is not part of the
output; the token with which a grammar ends is part of it. What was sampled behind the end of a stop
string is dropped, uncounted.
"""

from collections.abc import Callable, Sequence

from triptych.engine_core.errors import InvalidRequest, RequestError, SlowReader
from triptych.engine_core.step import FinishReason
from triptych.services.tokenizer.detokenizer import IncrementalDetokenizer
from triptych.services.tokenizer.pieces import LoggedToken, Piece, PromptPart
from triptych.services.tokenizer.sampling_validation import wire_named
from triptych.services.tokenizer.stop_strings import StopStrings
from triptych.services.tokenizer.validation import OutputParams
from triptych.services.transport.step_outputs import TokenLogprobs

MAX_UNREAD_ALTERNATIVES = 1 << 22
"""Of logprobs that wait for their reader, all choices together; 32 MiB."""


class OutputStream:
    """A TokenSink. `on_wake` is called once per drain that brought something; event loop only."""

    def __init__(
        self,
        params: OutputParams,
        detokenizer: IncrementalDetokenizer,
        prompt: PromptPart,
        on_wake: Callable[[], None],
    ) -> None:
        self._params = params
        self._detokenizer = detokenizer
        self._prompt = prompt
        self._on_wake = on_wake
        self._stop_strings = StopStrings(params.stop, include_in_output=params.include_stop)
        self._pending = Piece()
        self._texts: list[str] = []  # of the pending piece: joined once, however many came
        self._logged: list[LoggedToken] = []  # as far as reported, beside the pending ids
        self._unread = self._alternatives = 0  # since the last take
        self._most_alternatives = MAX_UNREAD_ALTERNATIVES // params.n
        self._counted = 0  # sampled tokens that pieces have told of
        self._logprob = 0.0
        self._score: float | None = None
        self._error: RequestError | None = None
        self._ended = False
        self._told = False  # the reader knows of what is pending: what one drain brings is not late
        self.completion_tokens = 0
        """Sampled tokens that count, delivered or not."""

    @property
    def ended(self) -> bool:
        """Whether no token or error can follow."""
        return self._ended

    @property
    def mean_logprob(self) -> float:
        """Of the sampled tokens; -infinity without any."""
        return self._logprob / self.completion_tokens if self.completion_tokens else -float("inf")

    # ----------------------------------------------------------------------- from the scheduler

    def accept(self, token_id: int, finish: int, logprobs: TokenLogprobs | None = None) -> bool:
        """Take the next token. True when the scheduler need not go on: it is to be aborted."""
        if self._ended:
            return True
        if not self.completion_tokens and self._params.echo:
            self._echo()
        self.completion_tokens += 1
        self._unread += 1
        self._pending.token_ids.append(token_id)
        if logprobs is not None:
            self._logprob += logprobs.logprob
        if self._params.logprobs is not None:
            self._log(token_id, logprobs)
        if finish == FinishReason.STOP and self._only_ends(token_id):
            self._finish(FinishReason.STOP, stop_token_id=token_id)
            return False
        if self._add(self._detokenizer.push((token_id,))):
            return True
        if finish:
            self._finish(FinishReason(finish))
        elif self._told and self._late():
            return True
        return False

    def started(self, cached_tokens: int) -> None:
        """The first token follows."""
        self._prompt.started(cached_tokens)

    def prompt_logprobs(self, position: int, rows: Sequence[TokenLogprobs]) -> None:
        """Of the prompt, from `position` on. Raises InvalidRequest for positions outside it."""
        self._prompt.add(position, rows)

    def scored(self, score: float) -> None:
        """A beam hypothesis's score; its last token follows."""
        self._score = score

    def fail(self, error: RequestError) -> None:
        """End with an error. What is pending is dropped: a client must not take it for whole."""
        if not self._ended:
            self._ended = True
            self._error = wire_named(error) if isinstance(error, InvalidRequest) else error
            self._pending, self._texts, self._logged = Piece(), [], []

    def wake(self) -> None:
        """Tell the reader that something came."""
        self._told = True
        self._on_wake()

    def cancel(self) -> None:
        """End as the client wished, with what there is."""
        if not self._ended:
            self._finish(FinishReason.ABORT)

    def _echo(self) -> None:
        self._texts.append(self._prompt.text)
        self._pending.token_ids.extend(self._prompt.token_ids)
        if self._params.logprobs is not None:
            self._logged.extend(self._prompt.logged())

    def _only_ends(self, token_id: int) -> bool:
        return self._params.end_token_ids is None or token_id in self._params.end_token_ids

    def _log(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        piece = self._detokenizer.piece(token_id)
        self._logged.append(LoggedToken(token_id, piece, logprobs))
        if logprobs is not None:
            self._alternatives += len(logprobs.top_ids)

    def _late(self) -> bool:
        """Whether the reader has left too much unread; the output has failed then."""
        most, alternatives = self._params.max_unread_tokens, self._most_alternatives
        if self._unread <= most and self._alternatives <= alternatives:
            return False
        what = f"{most} tokens" if self._unread > most else f"{alternatives} logprobs"
        self.fail(SlowReader(f"more than {what} wait for their reader"))
        return True

    def _add(self, text: str) -> bool:
        """Whether a stop string ended the output with this text."""
        if not self._params.stop:
            self._texts.append(text)
            return False
        armed = self.completion_tokens >= self._params.min_tokens
        released = self._stop_strings.push(text, armed=armed)
        self._texts.append(released.text)
        if released.stop is None:
            return False
        self._pending.stop_string = released.stop
        self._end(FinishReason.STOP)
        return True

    def _finish(self, reason: FinishReason, stop_token_id: int | None = None) -> None:
        """No token follows: what was held back is text now, and may complete a stop string."""
        if self._add(self._detokenizer.finish()):
            return
        self._texts.append(self._stop_strings.finish())
        if stop_token_id in self._params.stop_token_ids:
            self._pending.stop_token_id = stop_token_id
        self._end(reason)

    def _end(self, reason: FinishReason) -> None:
        self._ended = True
        self._pending.finish = reason
        self._pending.completion_tokens = self.completion_tokens
        self._pending.score = self._score

    # ---------------------------------------------------------------------------- to the client

    def check(self) -> None:
        """Raises the error that ended the choice, if one did."""
        if self._error is not None:
            raise self._error

    def take(self) -> Piece | None:
        """What came since the last call; None when it is nothing that the client asked for.

        Raises the error that ended the choice.
        """
        self._told = False
        self.check()
        self._unread = self._alternatives = 0
        piece, params = self._pending, self._params
        piece.text = "".join(self._texts)
        wanted = (
            (piece.text and params.text) or (piece.token_ids and params.token_ids) or self._logged
        )
        if not wanted and piece.finish is None:
            piece.token_ids.clear()  # their text is held back; nobody wants the ids
            return None
        self._pending, self._texts = Piece(), []
        if self._logged:
            piece.logprobs, self._logged = self._logged, []
        piece.new_tokens = self.completion_tokens - self._counted
        self._counted = self.completion_tokens
        return piece
