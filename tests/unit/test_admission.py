import dataclasses
from typing import Any

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
from triptych.engine_core.sampling_params import BeamParams, SamplingParams

LIMITS = Limits(
    max_model_len=16,
    max_num_seqs=2,
    max_num_batched_tokens=4,
    max_num_waiting=1,
    vocabulary_size=10,
    sampleable_vocabulary=8,
    max_num_logits=3,
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


def test_a_scored_prompt_has_ids_that_can_be_drawn() -> None:
    check(request((9, 9)))
    params = SamplingParams(max_tokens=3, prompt_logprobs=0)
    check(Request(RequestId(1), (7, 7), params))
    with pytest.raises(InvalidRequest, match="prompt: token id 8 at index 1 is not within 0 and 7"):
        check(Request(RequestId(1), (7, 8), params))


def test_min_tokens_leaves_something_to_draw() -> None:
    every = tuple(range(8))
    params = SamplingParams(max_tokens=3, min_tokens=1, stop_token_ids=every)
    with pytest.raises(InvalidRequest, match="stop_token_ids: they are all 8 tokens"):
        check(Request(RequestId(1), (1,), params))
    check(Request(RequestId(1), (1,), dataclasses.replace(params, min_tokens=0)))
    check(Request(RequestId(1), (1,), dataclasses.replace(params, stop_token_ids=every[1:])))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", ((9, 1.0), (10, 1.0))),
        ("allowed_token_ids", (1, 10)),
        ("bad_words", ((1,), (2, 10))),
    ],
)
def test_ids_in_parameters_are_below_the_vocabulary(field: str, value: Any) -> None:
    params = dataclasses.replace(SamplingParams(max_tokens=3), **{field: value})
    wish = Request(RequestId(1), (1,), params)
    with pytest.raises(InvalidRequest, match="token id 10 at index 1 is not within 0 and 9") as no:
        check(wish)
    assert no.value.field.startswith(field)


@pytest.mark.parametrize(("allowed", "stops", "min_tokens"), [((8, 9), (), 0), ((3,), (3,), 1)])
def test_what_is_allowed_can_be_drawn(
    allowed: tuple[int, ...], stops: tuple[int, ...], min_tokens: int
) -> None:
    params = SamplingParams(
        max_tokens=3, min_tokens=min_tokens, allowed_token_ids=allowed, stop_token_ids=stops
    )
    with pytest.raises(InvalidRequest, match="allowed_token_ids: none of the"):
        check(Request(RequestId(1), (1,), params))


def test_what_is_allowed_is_not_all_banned() -> None:
    params = SamplingParams(max_tokens=3, allowed_token_ids=(4, 5), bad_words=((4,), (5,), (1, 2)))
    with pytest.raises(InvalidRequest, match="allowed_token_ids: none of the 2 ids can be drawn"):
        check(Request(RequestId(1), (1,), params))
    for harmless in (((4,),), ((4,), (5, 5))):
        params = dataclasses.replace(params, bad_words=harmless)
        check(Request(RequestId(1), (1,), params))


def test_beams_fit_places_and_pool() -> None:
    def wish(width: int, max_tokens: int, prompt_logprobs: int = -1) -> Request:
        params = SamplingParams(
            max_tokens=max_tokens, beam=BeamParams(width=width), prompt_logprobs=prompt_logprobs
        )
        return Request(RequestId(1), (1, 2, 3), params)

    check(wish(2, 4))  # 2 blocks of prompt, 2 beams of 2 + 1
    with pytest.raises(TooLong, match="need 10 blocks of 2, the KV cache has 8") as refused:
        check(wish(2, 5))
    assert refused.value.field == "beam_width"
    with pytest.raises(InvalidRequest, match="beam_width: 3 is above max_num_seqs 2"):
        check(wish(3, 1))
    with pytest.raises(InvalidRequest, match="prompt_logprobs: not together"):
        check(wish(2, 1, prompt_logprobs=0))


def test_the_queue_has_a_bound() -> None:
    check_queue(2, 1, LIMITS)
    check_queue(0, 3, LIMITS)
    for running, new in ((3, 1), (2, 2), (0, 4)):
        with pytest.raises(QueueFull, match="the bound is 3") as refused:
            check_queue(running, new, LIMITS)
    assert refused.value.retry_after_ms > 0


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_model_len", 1, "max_model_len: 1 is below 2"),
        ("max_num_seqs", 0, "max_num_seqs: 0 is below 1"),
        ("max_num_waiting", -1, "max_num_waiting: -1 is below 0"),
        ("max_num_batched_tokens", 1, "max_num_batched_tokens: 1 is below max_num_seqs 2"),
        ("sampleable_vocabulary", 11, "11 is above vocabulary_size 10"),
        ("max_num_logits", 1, "max_num_logits: 1 is below max_num_seqs 2"),
        ("watermark_blocks", -1, "watermark_blocks: -1 is below 0"),
        ("long_prefill_token_threshold", -1, "long_prefill_token_threshold: -1 is below 0"),
    ],
)
def test_limits_that_cannot_work_are_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(LIMITS, **{field: value})


def test_max_sequence_len_is_the_tighter_bound() -> None:
    assert max_sequence_len(100, 8, 16) == 100
    assert max_sequence_len(200, 8, 16) == 128
