"""Pieces of output as the messages of the public service."""

from array import array
from collections.abc import Iterable
from typing import TypeVar

from triptych.services.tokenizer.pieces import LoggedToken, Piece
from triptych.services.tokenizer.sampling_validation import ALL_LOGPROBS
from triptych.services.tokenizer.tokenizer import Tokenizer
from triptych.services.tokenizer.validation import OutputParams
from triptych.services.transport.step_outputs import TokenLogprobs
from triptych.v1 import common_pb2, inference_pb2

Response = TypeVar("Response", inference_pb2.GenerateResponse, inference_pb2.ChatResponse)


class Responses:
    """Makes the responses of one request, with what its client asked for."""

    def __init__(self, output: OutputParams, tokenizer: Tokenizer, vocabulary_size: int) -> None:
        self._output = output
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary_size

    def response_of(self, kind: type[Response], piece: Piece) -> Response:
        """One response."""
        response = kind()
        self.fill(response, piece)
        return response

    def fill(
        self, response: inference_pb2.GenerateResponse | inference_pb2.ChatResponse, piece: Piece
    ) -> None:
        """The same into an empty message."""
        output = self._output
        if piece.index:
            response.index = piece.index
        if output.text:
            response.text = piece.text
            if isinstance(response, inference_pb2.ChatResponse):
                _add_chat(response, piece)
        if output.token_ids:
            response.token_ids.extend(piece.token_ids)
        if piece.logprobs:
            response.logprobs.extend(self._logprobs(piece.logprobs, output.logprobs))
        if piece.prompt_logprobs:
            rows = self._logprobs(piece.prompt_logprobs, output.prompt_logprobs)
            response.prompt_logprobs.extend(rows)
        if piece.finish is not None:
            self._end(response, piece)

    def _end(
        self,
        response: inference_pb2.GenerateResponse | inference_pb2.ChatResponse,
        piece: Piece,
    ) -> None:
        response.finish_reason = piece.finish_reason
        if piece.stop_string is not None:
            response.stop_string = piece.stop_string
        elif piece.stop_token_id is not None:
            response.stop_token_id = piece.stop_token_id
        if piece.score is not None:
            response.score = piece.score
        if piece.usage is not None:
            response.usage.prompt_tokens = piece.usage.prompt_tokens
            response.usage.completion_tokens = piece.usage.completion_tokens
            response.usage.cached_tokens = piece.usage.cached_tokens

    def _logprobs(
        self, rows: Iterable[LoggedToken], wished: int | None
    ) -> Iterable[common_pb2.TokenLogprob]:
        for row in rows:
            message = common_pb2.TokenLogprob(
                token_id=row.token_id,
                token=row.data,
                text=self._tokenizer.token_text(row.token_id),
            )
            if row.logprobs is not None:
                message.logprob = row.logprobs.logprob
                message.rank = row.logprobs.rank
                self._add_top(message, row.logprobs, wished or 0)
            yield message

    def _add_top(
        self, message: common_pb2.TokenLogprob, logprobs: TokenLogprobs, wished: int
    ) -> None:
        if wished == ALL_LOGPROBS:
            every = array("f", [-float("inf")]) * self._vocabulary_size
            for token_id, logprob in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True):
                if token_id < self._vocabulary_size:
                    every[token_id] = logprob
            message.vocabulary_logprobs.extend(every)
            return
        top = zip(logprobs.top_ids[:wished], logprobs.top_logprobs[:wished], strict=True)
        for token_id, logprob in top:
            message.top.add(
                token_id=token_id,
                token=self._tokenizer.token_bytes(token_id),
                text=self._tokenizer.token_text(token_id),
                logprob=logprob,
            )


def _add_chat(response: inference_pb2.ChatResponse, piece: Piece) -> None:
    response.reasoning = piece.reasoning
    for call in piece.calls:
        response.tool_calls.add(
            index=call.index, id=call.id, name=call.name, arguments=call.arguments
        )
