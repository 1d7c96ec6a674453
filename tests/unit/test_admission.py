import dataclasses

import pytest

from triptych.engine_core.admission import (
    Limits,
    check_queue,
    check_request,
    max_sequence_len,
)
from triptych.engine_core.errors import InvalidRequest, QueueFull, TooLong
from triptych.engine_core.ids import RequestId
from triptych.engine_core.request import Request
from triptych.engine_core.sampling_params import SamplingParams

LIMITS = Limits(
    max_model_len=16,
    max_num_seqs=2,
    max_num_batched_tokens=4,
    max_num_waiting=1,
    vocabulary_size=10,
    sampleable_vocabulary=8,
)


def check(request: Request, num_blocks: int = 8) -> None:
    check_request(request, LIMITS, num_blocks, block_size=2)


def request(
    prompt: tuple[int, ...] = (1, 2), output: tuple[int, ...] = (), max_tokens: int = 3
) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request(RequestId(1), prompt, params, output_token_ids=output)


def test_what_fits_exactly_is_accepted() -> None:
    check(request((0,) * 15, max_tokens=1))
    check(request((9,) * 2, max_tokens=14))


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "num_blocks", "field", "bound"),
    [
        (16, 1, 8, "prompt", "16"),
        (15, 2, 8, "max_tokens", "max_model_len 16"),
        (10, 3, 6, "max_tokens", "12 tokens that the KV cache holds (6 blocks of 2)"),
    ],
)
def test_too_long_names_prompt_max_tokens_and_bound(
    prompt: int, max_tokens: int, num_blocks: int, field: str, bound: str
) -> None:
    with pytest.raises(TooLong) as refused:
        check(request((1,) * prompt, max_tokens=max_tokens), num_blocks)
    assert refused.value.field == field
    assert f"prompt of {prompt} tokens and max_tokens {max_tokens}" in refused.value.message
    assert bound in refused.value.message


@pytest.mark.parametrize("token_id", [-1, 10])
def test_token_ids_are_below_the_vocabulary(token_id: int) -> None:
    expected = f"token id {token_id} at index 1 is not within 0 and 9"
    with pytest.raises(InvalidRequest, match=f"prompt: {expected}"):
        check(request((1, token_id)))
    with pytest.raises(InvalidRequest, match=f"output_token_ids: {expected}"):
        check(request((1,), (0, token_id)))
    params = SamplingParams(max_tokens=3, stop_token_ids=(0, token_id))
    with pytest.raises(InvalidRequest, match=f"stop_token_ids: {expected}"):
        check(Request(RequestId(1), (1,), params))


def test_min_tokens_leaves_something_to_draw() -> None:
    every = tuple(range(8))
    params = SamplingParams(max_tokens=3, min_tokens=1, stop_token_ids=every)
    with pytest.raises(InvalidRequest, match="stop_token_ids: they are all 8 tokens"):
        check(Request(RequestId(1), (1,), params))
    check(Request(RequestId(1), (1,), dataclasses.replace(params, min_tokens=0)))
    check(Request(RequestId(1), (1,), dataclasses.replace(params, stop_token_ids=every[1:])))


def test_the_queue_has_a_bound() -> None:
    check_queue(2, LIMITS)
    with pytest.raises(QueueFull, match="the bound is 3") as refused:
        check_queue(3, LIMITS)
    assert refused.value.retry_after_ms > 0


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_model_len", 1, "max_model_len: 1 is below 2"),
        ("max_num_seqs", 0, "max_num_seqs: 0 is below 1"),
        ("max_num_waiting", -1, "max_num_waiting: -1 is below 0"),
        ("max_num_batched_tokens", 1, "max_num_batched_tokens: 1 is below max_num_seqs 2"),
        ("sampleable_vocabulary", 11, "11 is above vocabulary_size 10"),
    ],
)
def test_limits_that_cannot_work_are_refused(field: str, value: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(LIMITS, **{field: value})


def test_max_sequence_len_is_the_tighter_bound() -> None:
    assert max_sequence_len(100, 8, 16) == 100
    assert max_sequence_len(200, 8, 16) == 128
