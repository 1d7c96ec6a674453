"""What passes from an output's tokens to its responses, as values."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from triptych.engine_core.errors import InvalidRequest
from triptych.engine_core.step import FinishReason
from triptych.services.tokenizer.chat_output import CallDelta
from triptych.services.tokenizer.detokenizer import IncrementalDetokenizer
from triptych.services.tokenizer.tokenizer import Tokenizer
from triptych.services.transport.step_outputs import TokenLogprobs
from triptych.v1 import common_pb2

MAX_ALTERNATIVES = 1 << 14
"""In one response: about half a mebibyte, and some 20 ms to make."""


class LoggedToken(NamedTuple):
    """A token whose logprob is reported. `data`: the bytes that it adds to the text."""

    token_id: int
    data: bytes
    logprobs: TokenLogprobs | None


class RequestUsage(NamedTuple):
    """Tokens of a request, all its choices together."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class Piece:
    """What came of one choice since its last piece.

    `finish`, `completion_tokens` and `score` are set on the choice's last one, `usage` on the last
    one of the request. `new_tokens`: sampled tokens since the last piece, delivered as ids or not.
    `reasoning` and `calls`: of a chat, what is not `text`. `called`: calls are why it ended.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    completion_tokens: int = 0
    stop_string: str | None = None
    stop_token_id: int | None = None
    index: int = 0
    logprobs: Sequence[LoggedToken] = ()
    prompt_logprobs: Sequence[LoggedToken] = ()
    score: float | None = None
    usage: RequestUsage | None = None
    reasoning: str = ""
    calls: Sequence[CallDelta] = ()
    called: bool = False
    new_tokens: int = field(default=0, compare=False)

    @property
    def finish_reason(self) -> common_pb2.FinishReason.ValueType:
        """As on the wire."""
        if self.called:
            return common_pb2.FINISH_REASON_TOOL_CALLS
        # engine_core's numbers are the wire's; a test holds them together
        return common_pb2.FinishReason.ValueType(self.finish or 0)


class PromptPart:
    """What is known of a request's prompt; its choices share it."""

    def __init__(
        self, token_ids: Sequence[int] = (), text: str = "", pieces: Sequence[bytes] = ()
    ) -> None:
        """`text` for echo, `pieces` (the bytes of each token) where logprobs are reported."""
        self.token_ids = token_ids
        self.text = text
        self._pieces = pieces
        self._rows: list[TokenLogprobs | None] = [None] * len(token_ids)
        self.cached_tokens: int | None = None

    def started(self, cached_tokens: int) -> None:
        """A choice has its first token. The first one counts: the others find what it computed."""
        if self.cached_tokens is None:
            self.cached_tokens = cached_tokens

    def add(self, position: int, rows: Sequence[TokenLogprobs]) -> None:
        """Logprobs of the tokens from `position` on. Raises InvalidRequest for other positions."""
        end = position + len(rows)
        if position < 1 or end > len(self._rows):
            raise InvalidRequest(
                "prompt_logprobs", f"positions {position} to {end} of {len(self._rows)}"
            )
        self._rows[position:end] = rows

    def logged(self) -> list[LoggedToken]:
        """All tokens; none while a logprob is missing. The first one has none."""
        if None in islice(self._rows, 1, None):
            return []
        return [
            LoggedToken(*each)
            for each in zip(self.token_ids, self._pieces, self._rows, strict=True)
        ]


def prompt_pieces(
    tokenizer: Tokenizer, token_ids: Sequence[int], text: str, *, skip_special_tokens: bool
) -> list[bytes]:
    """The bytes of each prompt token; joined, they are `text` wherever its tokens spell it.

    A special token that would be left out stands for its spelling where the text has it.
    """
    stream = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    spelled, at, pieces = text.encode(), 0, []
    for token_id in token_ids:
        piece = stream.piece(token_id)
        stream.push((token_id,))
        if not piece and token_id in tokenizer.special_token_ids:
            own = tokenizer.token_bytes(token_id)
            piece = own if spelled.startswith(own, at) else b""
        if spelled.startswith(piece, at):
            at += len(piece)
        pieces.append(piece)
    return pieces


def parts_of(piece: Piece) -> list[Piece]:
    """The piece, or several where its logprobs are too many for one response.

    The prompt's come first, then tokens; text and end are on the last part.
    """
    if _weight(piece.logprobs) + _weight(piece.prompt_logprobs) <= MAX_ALTERNATIVES:
        return [piece]
    parts = [
        Piece(index=piece.index, prompt_logprobs=rows) for rows in _portions(piece.prompt_logprobs)
    ]
    piece.prompt_logprobs = ()
    begin = 0
    for rows in _portions(piece.logprobs):
        ids = piece.token_ids[begin : begin + len(rows)]
        parts.append(Piece(index=piece.index, token_ids=ids, logprobs=rows))
        begin += len(rows)
    last = parts[-1]
    piece.token_ids, piece.logprobs = last.token_ids + piece.token_ids[begin:], last.logprobs
    piece.prompt_logprobs = last.prompt_logprobs
    parts[-1] = piece
    return parts


def _weight(rows: Sequence[LoggedToken]) -> int:
    return sum(_alternatives(row) for row in rows)


def _alternatives(row: LoggedToken) -> int:
    return 1 + (len(row.logprobs.top_ids) if row.logprobs is not None else 0)


def _portions(rows: Sequence[LoggedToken]) -> Iterator[list[LoggedToken]]:
    portion: list[LoggedToken] = []
    weight = 0
    for row in rows:
        more = _alternatives(row)
        if portion and weight + more > MAX_ALTERNATIVES:
            yield portion
            portion, weight = [], 0
        portion.append(row)
        weight += more
    if portion:
        yield portion
