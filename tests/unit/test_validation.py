"""Raw requests to validated ones: every refusal names field, value and bound."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from triptych.engine_core.errors import InvalidRequest, TooLong, UnknownModel
from triptych.engine_core.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams
from triptych.engine_core.step import FinishReason
from triptych.services.tokenizer.output_validation import output_params
from triptych.services.tokenizer.sampling_validation import (
    decimal,
    sampling_params,
    with_prompt,
)
from triptych.services.tokenizer.validation import (
    OutputParams,
    Routing,
    ServedModel,
    ValidRequest,
    check_model,
    check_prompt_length,
    check_token_ids,
    routing,
    token_array,
)
from triptych.v1 import common_pb2, inference_pb2

V, L = 100, 64
EOS = (7, 8)
MODEL = ServedModel(("tiny", "alias"), V, L, L, EOS)
SMALL_POOL = ServedModel(("tiny",), V, L, 48, EOS)


def raw(**fields: Any) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(**fields)


def no_words(word: str) -> list[int]:
    raise AssertionError("no bad words here")


def valid(**fields: Any) -> SamplingParams:
    return sampling_params(raw(**fields), MODEL, None, no_words)


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("temperature", math.nan, "nan"),
        ("temperature", math.inf, "inf"),
        ("temperature", -0.1, "-0.1"),
        ("temperature", 100.5, "100.5"),
        ("top_p", math.nan, "nan"),
        ("top_p", -0.1, "-0.1"),
        ("top_p", 1.1, "1.1"),
        ("min_p", math.nan, "nan"),
        ("min_p", -math.inf, "-inf"),
        ("min_p", 1.5, "1.5"),
        ("top_k", -2, "-2"),
        ("max_tokens", 0, "0"),
        ("stop_token_ids", [3, V], str(V)),
        ("stop_token_ids", [2**32 - 1], str(2**32 - 1)),
        ("stop_token_ids", [1] * 129, "129"),
    ],
)
def test_sampling_fields_out_of_bounds(field: str, value: object, shown: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        valid(**{field: value})
    assert caught.value.field.startswith(f"sampling_params.{field}")
    assert shown in caught.value.description


@pytest.mark.parametrize(
    ("fields", "name", "expected"),
    [
        ({}, "temperature", 1.0),
        ({}, "top_p", 1.0),
        ({}, "top_k", 0),
        ({"temperature": 0.0}, "temperature", 0.0),
        ({"temperature": 0.7}, "temperature", 0.7),
        ({"top_p": 0.0}, "top_p", 0.0),
        ({"top_k": -1}, "top_k", -1),
        ({"top_k": V}, "top_k", V),
        ({"top_k": 10**7}, "top_k", V),
        ({"min_p": 1.0}, "min_p", 1.0),
        ({"seed": 0}, "seed", 0),
        ({"seed": 2**64 - 1}, "seed", 2**64 - 1),
    ],
)
def test_values_that_are_taken(fields: dict[str, Any], name: str, expected: float) -> None:
    assert getattr(valid(**fields), name) == expected


def test_min_tokens_above_max_tokens() -> None:
    with pytest.raises(InvalidRequest, match=r"sampling_params\.min_tokens: 5 .* 4"):
        valid(min_tokens=5, max_tokens=4)
    provisional = valid(min_tokens=60)
    with pytest.raises(InvalidRequest, match=r"sampling_params\.min_tokens: 60 .* 56"):
        with_prompt(provisional, check_prompt_length(8, "text", raw(), MODEL))


def test_end_of_sequence_ids_stop_unless_ignored() -> None:
    assert valid(stop_token_ids=[3, 7]).stop_token_ids == (3, 7, 8)
    assert valid(ignore_eos=True).stop_token_ids == ()
    assert valid(ignore_eos=True, stop_token_ids=[7]).stop_token_ids == (7,)
    most = list(range(10, 10 + 90)) * 2
    assert len(valid(stop_token_ids=most[:MAX_STOP_TOKEN_IDS]).stop_token_ids) == 90 + len(EOS)


def test_the_most_stop_ids_leave_room_for_the_end_of_sequence() -> None:
    model = ServedModel(("tiny",), 1000, L, L, (999,))
    ids = list(range(MAX_STOP_TOKEN_IDS))
    params = sampling_params(raw(stop_token_ids=ids), model, None, no_words)
    assert len(params.stop_token_ids) == MAX_STOP_TOKEN_IDS + 1


def test_seeds_are_drawn_given_or_the_engines() -> None:
    assert valid().seed != valid().seed
    assert sampling_params(raw(), MODEL, 5, no_words).seed == 5
    assert sampling_params(raw(seed=9), MODEL, 5, no_words).seed == 9


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "fits"),
    [(63, 1, True), (63, 2, False), (64, 1, False), (65, 1, False),
     (8, 56, True), (8, 57, False), (8, 61, False), (8, 2**32 - 1, False)],
)  # fmt: skip
def test_prompt_and_output_share_the_context(prompt: int, max_tokens: int, fits: bool) -> None:
    params = raw(max_tokens=max_tokens)
    if fits:
        assert check_prompt_length(prompt, "text", params, MODEL) == max_tokens
        return
    with pytest.raises(TooLong) as caught:
        check_prompt_length(prompt, "text", params, MODEL)
    for number in (prompt, max_tokens, L):
        assert str(number) in caught.value.message


def test_the_pool_bounds_too() -> None:
    assert check_prompt_length(8, "text", raw(), SMALL_POOL) == 40
    assert check_prompt_length(8, "text", raw(max_tokens=40), SMALL_POOL) == 40
    with pytest.raises(TooLong, match=r"max_tokens: .* 8 tokens .* 41 makes 49, above the 48 tok"):
        check_prompt_length(8, "text", raw(max_tokens=41), SMALL_POOL)
    with pytest.raises(TooLong, match=r"^text: .* 48 tokens"):
        check_prompt_length(48, "text", raw(), SMALL_POOL)


def test_unset_max_tokens_takes_what_is_left() -> None:
    assert check_prompt_length(60, "text", raw(), MODEL) == 4
    with pytest.raises(TooLong):
        check_prompt_length(64, "text", raw(), MODEL)


def test_an_empty_prompt() -> None:
    with pytest.raises(InvalidRequest, match="text: the prompt has no tokens"):
        check_prompt_length(0, "text", raw(), MODEL)


def test_token_ids() -> None:
    assert check_token_ids([0, V - 1], "x", V).tolist() == [0, V - 1]
    assert (len(check_token_ids([], "x", V)), check_token_ids([], "x", V).itemsize) == (0, 4)
    repeated = common_pb2.TokenIds(ids=range(50)).ids
    assert check_token_ids(repeated, "x", V).tolist() == list(range(50))
    for bad in (V, 2**31, 2**32 - 1):
        with pytest.raises(InvalidRequest, match=rf"x\[1\]: token id {bad} is not below .* {V}"):
            check_token_ids([0, bad], "x", V)


@pytest.mark.parametrize(
    ("stop", "field", "shown"),
    [
        (["a", ""], "sampling_params.stop[1]", "0 bytes"),
        (["y" * 1025], "sampling_params.stop[0]", "1025 bytes"),
        (["é" * 513], "sampling_params.stop[0]", "1026 bytes"),
        (["x"] * 17, "sampling_params.stop", "17 strings, more than 16"),
    ],
)
def test_stop_strings(stop: list[str], field: str, shown: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        output_params(raw(stop=stop), 0, MODEL, 10)
    assert caught.value.field == field
    assert shown in caught.value.description


def test_output_params() -> None:
    most = output_params(raw(stop=["x" * 1024] * 16), 0, MODEL, 10)
    assert most == OutputParams(stop=("x" * 1024,), max_unread_tokens=10)
    named = output_params(raw(stop_token_ids=[3, 7], ignore_eos=False), 0, MODEL, 10)
    assert named.stop_token_ids == {3}
    named = output_params(raw(stop_token_ids=[3, 7], ignore_eos=True), 0, MODEL, 10)
    assert named.stop_token_ids == {3, 7}
    assert not output_params(raw(skip_special_tokens=False), 0, MODEL, 10).skip_special_tokens
    with pytest.raises(InvalidRequest, match="output_format: 9"):
        output_params(raw(), 9, MODEL, 10)


@pytest.mark.parametrize("name", ["nobody", "TINY", "tiny ", "../x", "x" * 10_000])
def test_unknown_models(name: str) -> None:
    with pytest.raises(UnknownModel) as caught:
        check_model(name, MODEL.names)
    assert "tiny, alias" in caught.value.message
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("name", ["", "tiny", "alias"])
def test_known_models(name: str) -> None:
    check_model(name, MODEL.names)


def test_request_ids() -> None:
    assert routing(inference_pb2.GenerateRequest(request_id="x" * 128)).label == "x" * 128
    with pytest.raises(InvalidRequest, match="request_id: 130 bytes, more than 128"):
        routing(inference_pb2.GenerateRequest(request_id="é" * 65))


@pytest.mark.parametrize("kind", [inference_pb2.GenerateRequest, inference_pb2.ChatRequest])
def test_routing(
    kind: type[inference_pb2.GenerateRequest] | type[inference_pb2.ChatRequest],
) -> None:
    assert routing(kind()) == Routing()
    given = kind(cache_salt="s", tenant="t", priority=-5, queue_timeout_ms=7, timeout_ms=9)
    assert routing(given) == Routing("", -5, "s", "t", 7, 9)
    for bad, field in (
        (kind(cache_salt="x" * 257), "cache_salt"), (kind(tenant="x" * 129), "tenant"),
        (kind(queue_timeout_ms=0), "queue_timeout_ms"), (kind(timeout_ms=0), "timeout_ms"),
    ):  # fmt: skip
        with pytest.raises(InvalidRequest) as caught:
            routing(bad)
        assert caught.value.field == field


def test_the_message_to_the_scheduler() -> None:
    request = ValidRequest(
        check_token_ids([1, 258], "x", 300),
        valid(max_tokens=5, min_tokens=2, temperature=0.5, stop_token_ids=[3], seed=4),
        OutputParams(),
        Routing("label", 3, "salt", "tenant", 10, 20),
    )
    submit = request.submit()
    assert submit.request_id == "label"
    assert (submit.priority, submit.cache_salt, submit.tenant) == (3, "salt", "tenant")
    assert (submit.queue_timeout_ms, submit.timeout_ms) == (10, 20)
    assert submit.prompt_token_ids == bytes([1, 0, 0, 0, 2, 1, 0, 0])
    assert (submit.params.max_tokens, submit.params.min_tokens, submit.params.seed) == (5, 2, 4)
    assert submit.params.temperature == 0.5
    assert list(submit.params.stop_token_ids) == [3, 7, 8]


def test_finish_reasons_are_the_wires_numbers() -> None:
    for reason in FinishReason:
        assert int(common_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}")) == int(reason)
    assert inference_pb2.OUTPUT_FORMAT_UNSPECIFIED == 0


@given(st.floats(width=32, allow_nan=False))
@example(1.401298464324817e-45)
@example(3.4028234663852886e38)
def test_a_float_is_shown_as_numpy_shows_it(value: float) -> None:
    assert decimal(value) == float(str(np.float32(value)))


def test_token_ids_that_do_not_fit_are_no_token_ids() -> None:
    for bad in (-1, 2**32):
        with pytest.raises(OverflowError):
            token_array([bad])
