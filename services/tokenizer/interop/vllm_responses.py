"""triptych.v1.GenerateResponse -> vllm.grpc.engine.GenerateResponse.

As vLLM's own servicer does: with `stream` a chunk for every piece, and behind a choice's last one a
`complete` that repeats it; without, only a `complete` for each choice, with the whole output.
Counts of a streamed message are those of its piece: the client adds them up.
"""

from collections.abc import Iterable, Iterator

from smg_grpc_proto.generated import vllm_engine_pb2

from triptych.v1 import common_pb2, inference_pb2

_REASONS = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_ABORT: "abort",
}


class VllmResponses:
    """Of one request."""

    def __init__(self, prompt_tokens: int, *, stream: bool) -> None:
        self._prompt_tokens = prompt_tokens
        self._stream = stream
        self._seen: set[int] = set()
        # Translated as they come, a piece at a time: at the end they may be millions.
        self._prompt_logprobs = vllm_engine_pb2.InputLogProbs()
        # Without stream: what has come of each choice.
        self._whole: dict[int, vllm_engine_pb2.GenerateComplete] = {}

    def of(
        self, piece: inference_pb2.GenerateResponse, cached_tokens: int
    ) -> Iterator[vllm_engine_pb2.GenerateResponse]:
        """The messages that a piece makes, in order."""
        _add_input_logprobs(self._prompt_logprobs, piece.prompt_logprobs)
        finished = bool(piece.finish_reason)
        if self._stream:
            if piece.token_ids or finished:
                yield self._chunk(piece, cached_tokens)
            complete = vllm_engine_pb2.GenerateComplete()
        else:
            if piece.index not in self._whole:
                self._whole[piece.index] = vllm_engine_pb2.GenerateComplete()
            complete = self._whole[piece.index]
        if self._stream and not finished:
            return
        complete.output_ids.extend(piece.token_ids)
        if piece.logprobs:
            _add_output_logprobs(complete.output_logprobs, piece.logprobs)
        if finished:
            self._whole.pop(piece.index, None)
            self._end(complete, piece, cached_tokens)
            yield vllm_engine_pb2.GenerateResponse(complete=complete)

    def _chunk(
        self, piece: inference_pb2.GenerateResponse, cached_tokens: int
    ) -> vllm_engine_pb2.GenerateResponse:
        chunk = vllm_engine_pb2.GenerateStreamChunk(
            token_ids=piece.token_ids,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=len(piece.token_ids),
            cached_tokens=cached_tokens,
            index=piece.index,
        )
        if piece.logprobs:
            _add_output_logprobs(chunk.output_logprobs, piece.logprobs)
        if piece.index not in self._seen and self._prompt_logprobs.token_ids:
            chunk.input_logprobs.CopyFrom(self._prompt_logprobs)
        self._seen.add(piece.index)
        return vllm_engine_pb2.GenerateResponse(chunk=chunk)

    def _end(
        self,
        complete: vllm_engine_pb2.GenerateComplete,
        last: inference_pb2.GenerateResponse,
        cached_tokens: int,
    ) -> None:
        complete.finish_reason = _REASONS[last.finish_reason]
        complete.prompt_tokens = self._prompt_tokens
        complete.completion_tokens = len(complete.output_ids)
        complete.cached_tokens = cached_tokens
        complete.index = last.index
        if self._prompt_logprobs.token_ids:
            complete.input_logprobs.CopyFrom(self._prompt_logprobs)
        match last.WhichOneof("stop_reason"):
            case "stop_string":
                complete.matched_stop_str = last.stop_string
            case "stop_token_id":
                complete.matched_token_id = last.stop_token_id


def _top(token: common_pb2.TokenLogprob) -> vllm_engine_pb2.TopLogProbs:
    if token.vocabulary_logprobs:
        return vllm_engine_pb2.TopLogProbs(
            values=token.vocabulary_logprobs, token_ids=range(len(token.vocabulary_logprobs))
        )
    return vllm_engine_pb2.TopLogProbs(
        values=[top.logprob for top in token.top], token_ids=[top.token_id for top in token.top]
    )


def _add_output_logprobs(
    answer: vllm_engine_pb2.OutputLogProbs, tokens: Iterable[common_pb2.TokenLogprob]
) -> None:
    for token in tokens:
        answer.token_logprobs.append(token.logprob)
        answer.token_ids.append(token.token_id)
        if token.top or token.vocabulary_logprobs:
            answer.top_logprobs.append(_top(token))


def _add_input_logprobs(
    answer: vllm_engine_pb2.InputLogProbs, tokens: Iterable[common_pb2.TokenLogprob]
) -> None:
    for token in tokens:
        value = token.logprob if token.HasField("logprob") else None
        answer.token_logprobs.add(value=value)
        answer.token_ids.append(token.token_id)
        answer.top_logprobs.append(_top(token))
