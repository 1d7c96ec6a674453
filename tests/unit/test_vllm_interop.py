"""VllmEngine's translations, its bounds, and what Abort finds."""

from array import array

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm_pb2

from triptych.engine_core.errors import InvalidRequest
from triptych.engine_core.sampling_params import SamplingParams
from triptych.services.tokenizer.interop.vllm_calls import VllmCalls
from triptych.services.tokenizer.interop.vllm_limits import LargestMessage
from triptych.services.tokenizer.interop.vllm_requests import to_generate
from triptych.services.tokenizer.interop.vllm_responses import VllmResponses
from triptych.services.tokenizer.validation import OutputParams, ValidRequest
from triptych.v1 import common_pb2, inference_pb2


class Cancelled:
    def __init__(self) -> None:
        self.count = 0

    def cancel(self) -> None:
        self.count += 1


def test_an_abort_before_the_request_runs_counts_once_it_does() -> None:
    calls, early, late = VllmCalls(), Cancelled(), Cancelled()
    with calls.open("r") as first, calls.open("r") as second:
        second.runs(late)
        calls.abort("r")
        calls.abort("r")
        assert late.count == 1
        first.runs(early)
        assert early.count == 1
    calls.abort("r")
    assert (early.count, late.count) == (1, 1)


def test_nobody_is_aborted_by_the_name_that_nameless_clients_share() -> None:
    calls, nameless = VllmCalls(), Cancelled()
    with calls.open("") as call:
        call.runs(nameless)
        calls.abort("")
    assert nameless.count == 0


@pytest.mark.parametrize("skipped", [False, True])
def test_stop_strings_are_looked_for_in_the_text_that_the_client_means(skipped: bool) -> None:
    request = vllm_pb2.GenerateRequest(text="x")
    request.sampling_params.skip_special_tokens = skipped
    assert to_generate(request, 100).sampling_params.skip_special_tokens is skipped


def valid(
    *, n: int = 1, prompt: int = 10, max_tokens: int = 10, logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> ValidRequest:  # fmt: skip
    output = OutputParams(n=n, best_of=n, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
    return ValidRequest(
        array("I", [1] * prompt), SamplingParams(max_tokens=max_tokens, n=n), output
    )


@pytest.mark.parametrize(
    ("request_", "stream", "field"),
    [
        (valid(prompt=100, prompt_logprobs=-1), True, "prompt_logprobs"),
        (valid(prompt=10_000, prompt_logprobs=20), True, "prompt_logprobs"),
        (valid(max_tokens=100, logprobs=-1), False, "logprobs"),
        (valid(max_tokens=100, logprobs=-1), True, None),  # a message a piece
        (valid(prompt=9, prompt_logprobs=-1), True, None),
        (valid(prompt=9, prompt_logprobs=-1, max_tokens=9, logprobs=-1), False, "logprobs"),
        (valid(prompt=1000, n=128, prompt_logprobs=40), True, "prompt_logprobs"),
        (valid(prompt=1000, n=128, prompt_logprobs=20), True, None),
        (valid(max_tokens=10**6, n=128), False, None),
    ],
)
def test_what_no_message_can_hold_is_refused_before_it_is_computed(
    request_: ValidRequest, stream: bool, field: str | None
) -> None:
    largest = LargestMessage(1 << 20, 10_000)
    if field is None:
        largest.check(request_, stream=stream)
        return
    with pytest.raises(InvalidRequest) as caught:
        largest.check(request_, stream=stream)
    assert caught.value.field == f"sampling_params.{field}"


def logged(token_id: int) -> common_pb2.TokenLogprob:
    answer = common_pb2.TokenLogprob(token_id=token_id, logprob=-token_id / 8)
    answer.top.add(token_id=token_id + 1, logprob=-0.125)
    return answer


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_logprobs_that_come_in_parts_are_told_whole_by_every_choice(stream: bool) -> None:
    responses = VllmResponses(3, stream=stream)
    stop = common_pb2.FINISH_REASON_STOP
    messages: list[vllm_pb2.GenerateResponse] = []
    for piece in (
        inference_pb2.GenerateResponse(prompt_logprobs=[logged(1), logged(2)]),
        inference_pb2.GenerateResponse(
            prompt_logprobs=[logged(3)], token_ids=[4], logprobs=[logged(4)]
        ),
        inference_pb2.GenerateResponse(index=1, token_ids=[6], finish_reason=stop),
        inference_pb2.GenerateResponse(token_ids=[5], logprobs=[logged(5)], finish_reason=stop),
    ):
        messages += responses.of(piece, 2)
    ends = {m.complete.index: m.complete for m in messages if m.HasField("complete")}
    chunks = [m.chunk for m in messages if m.HasField("chunk")]
    assert [end.input_logprobs.token_ids[:] for end in ends.values()] == [[1, 2, 3]] * 2
    told = ends[0].output_logprobs
    assert ends[0].output_ids[:] == told.token_ids[:] == ([5] if stream else [4, 5])
    assert ends[1].output_ids[:] == [6]
    assert not ends[1].HasField("output_logprobs")
    assert [top.token_ids[:] for top in told.top_logprobs] == [
        [each + 1] for each in told.token_ids
    ]
    if stream:
        assert [chunk.token_ids[:] for chunk in chunks] == [[4], [6], [5]]
        assert [chunk.input_logprobs.token_ids[:] for chunk in chunks] == [[1, 2, 3]] * 2 + [[]]
    else:
        assert chunks == []
