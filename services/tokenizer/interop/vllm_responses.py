"""triptych.v1.GenerateResponse -> vllm.grpc.engine.GenerateResponse.

As vLLM's own servicer does: with `stream` a chunk for every piece, and behind a choice's last one a
`complete` that repeats it; without, only a `complete` for each choice, with the whole output.
Counts of a streamed message are those of its piece: the client adds them up.
"""

from collections import defaultdict
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
        self._prompt_logprobs: list[common_pb2.TokenLogprob] = []
        # Without stream: what has come of each choice.
        self._ids: dict[int, list[int]] = defaultdict(list)
        self._logprobs: dict[int, list[common_pb2.TokenLogprob]] = defaultdict(list)

    def of(
        self, piece: inference_pb2.GenerateResponse, cached_tokens: int
    ) -> Iterator[vllm_engine_pb2.GenerateResponse]:
        """The messages that a piece makes, in order."""
        self._prompt_logprobs.extend(piece.prompt_logprobs)
        index, finished = piece.index, piece.finish_reason
        if self._stream:
            if piece.token_ids or finished:
                yield self._chunk(piece, cached_tokens)
            if finished:
                yield self._complete(piece, piece.token_ids, piece.logprobs, cached_tokens)
            return
        self._ids[index].extend(piece.token_ids)
        self._logprobs[index].extend(piece.logprobs)
        if finished:
            yield self._complete(piece, self._ids[index], self._logprobs[index], cached_tokens)

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
            chunk.output_logprobs.CopyFrom(_output_logprobs(piece.logprobs))
        if piece.index not in self._seen and self._prompt_logprobs:
            chunk.input_logprobs.CopyFrom(_input_logprobs(self._prompt_logprobs))
        self._seen.add(piece.index)
        return vllm_engine_pb2.GenerateResponse(chunk=chunk)

    def _complete(
        self,
        last: inference_pb2.GenerateResponse,
        token_ids: Iterable[int],
        logprobs: Iterable[common_pb2.TokenLogprob],
        cached_tokens: int,
    ) -> vllm_engine_pb2.GenerateResponse:
        complete = vllm_engine_pb2.GenerateComplete(
            output_ids=token_ids,
            finish_reason=_REASONS[last.finish_reason],
            prompt_tokens=self._prompt_tokens,
            cached_tokens=cached_tokens,
            index=last.index,
        )
        complete.completion_tokens = len(complete.output_ids)
        output = _output_logprobs(logprobs)
        if output.token_ids:
            complete.output_logprobs.CopyFrom(output)
        if self._prompt_logprobs:
            complete.input_logprobs.CopyFrom(_input_logprobs(self._prompt_logprobs))
        match last.WhichOneof("stop_reason"):
            case "stop_string":
                complete.matched_stop_str = last.stop_string
            case "stop_token_id":
                complete.matched_token_id = last.stop_token_id
        return vllm_engine_pb2.GenerateResponse(complete=complete)


def _top(token: common_pb2.TokenLogprob) -> vllm_engine_pb2.TopLogProbs:
    if token.vocabulary_logprobs:
        return vllm_engine_pb2.TopLogProbs(
            values=token.vocabulary_logprobs, token_ids=range(len(token.vocabulary_logprobs))
        )
    return vllm_engine_pb2.TopLogProbs(
        values=[top.logprob for top in token.top], token_ids=[top.token_id for top in token.top]
    )


def _output_logprobs(
    tokens: Iterable[common_pb2.TokenLogprob],
) -> vllm_engine_pb2.OutputLogProbs:
    answer = vllm_engine_pb2.OutputLogProbs()
    for token in tokens:
        answer.token_logprobs.append(token.logprob)
        answer.token_ids.append(token.token_id)
        if token.top or token.vocabulary_logprobs:
            answer.top_logprobs.append(_top(token))
    return answer


def _input_logprobs(
    tokens: Iterable[common_pb2.TokenLogprob],
) -> vllm_engine_pb2.InputLogProbs:
    answer = vllm_engine_pb2.InputLogProbs()
    for token in tokens:
        value = token.logprob if token.HasField("logprob") else None
        answer.token_logprobs.add(value=value)
        answer.token_ids.append(token.token_id)
        answer.top_logprobs.append(_top(token))
    return answer
