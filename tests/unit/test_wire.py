"""services/transport/wire.py: what a peer may send, and what it then means."""

import math
from typing import Any

import pytest

from triptych.engine_core.errors import (
    DeadlinePassed,
    FatalRequest,
    InvalidRequest,
    NotFinite,
    QueueFull,
    RequestError,
    TooLong,
    Unavailable,
)
from triptych.engine_core.ids import RequestId
from triptych.engine_core.sampling_params import ExternalSampler
from triptych.services.transport import step_outputs, wire
from triptych.v1 import stage_pb2

ONE = RequestId(1)


def submit(**changes: object) -> stage_pb2.Submit:
    message = stage_pb2.Submit(
        slot=3,
        prompt_token_ids=wire.pack_u32([1, 2]),
        params=stage_pb2.SequenceParams(
            max_tokens=4, top_p=1.0, typical_p=1.0, repetition_penalty=1.0, n=1
        ),
    )
    for field, value in changes.items():
        target = message.params if hasattr(message.params, field) else message
        setattr(target, field, value)
    return message


def test_a_plain_submit() -> None:
    request = wire.request_from_submit(submit(), ONE)
    assert request.prompt_token_ids == (1, 2)
    assert request.output_token_ids == ()
    assert request.params.greedy


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt_token_ids": b""}, "prompt"),
        ({"prompt_token_ids": b"\1\0\0"}, "prompt_token_ids"),
        ({"output_token_ids": b"\1\0\0\0\0"}, "output_token_ids"),
        ({"output_token_ids": bytes(16)}, "output_token_ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": math.inf}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"typical_p": 2.0}, "typical_p"),
        ({"top_n_sigma": math.inf}, "top_n_sigma"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": 3.0}, "presence_penalty"),
        ({"frequency_penalty": math.nan}, "frequency_penalty"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"logit_bias_ids": b"1"}, "logit_bias_ids"),
        ({"logit_bias_ids": bytes(4)}, "logit_bias_values"),
        ({"logit_bias_ids": bytes(8), "logit_bias_values": bytes(8)}, "logit_bias"),
        ({"allowed_token_ids": b"12345"}, "allowed_token_ids"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"tenant": "x" * 129}, "tenant"),
        ({"output_token_ids": bytes(4), "n": 2}, "output_token_ids"),
        ({"choice": 128}, "choice"),
        ({"choice": 2**32 - 1}, "choice"),
        ({"choice": 120, "n": 9}, "choice"),
    ],
)
def test_bad_values_name_their_field(changes: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        wire.request_from_submit(submit(**changes), ONE)
    assert caught.value.field == field


def test_a_beam_search_has_no_past() -> None:
    message = submit(output_token_ids=bytes(4))
    message.params.beam.width = 2
    message.params.beam.length_penalty = 1.0
    with pytest.raises(InvalidRequest) as caught:
        wire.request_from_submit(message, ONE)
    assert caught.value.field == "output_token_ids"


def test_an_external_sampler() -> None:
    message = submit(temperature=1.0, output_token_ids=bytes(4))
    message.params.external.lease, message.params.external.tag = 2**64 - 1, 7
    external = wire.request_from_submit(message, ONE).params.external
    assert external == ExternalSampler(lease=2**64 - 1, tag=7)
    message.params.external.lease = 0
    with pytest.raises(InvalidRequest) as caught:
        wire.request_from_submit(message, ONE)
    assert caught.value.field == "external_sampler.lease"
    message.params.external.lease, message.params.temperature = 1, 0.5
    with pytest.raises(InvalidRequest) as caught:
        wire.request_from_submit(message, ONE)
    assert caught.value.field == "temperature"


def test_an_empty_submit_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        wire.request_from_submit(stage_pb2.Submit(), ONE)


@pytest.mark.parametrize(
    "error",
    [
        TooLong("prompt", "9 tokens are more than 8"),
        InvalidRequest("temperature", "-1: is not within 0 and 100"),
        QueueFull("1024 requests wait", 250),
        NotFinite("the logits are not finite"),
        FatalRequest("executors died"),
        Unavailable("no executor", 1000),
        DeadlinePassed("queue_timeout: 5 s in the queue"),
    ],
)
def test_errors_survive_the_wire(error: RequestError) -> None:
    failure = wire.failure_from_error(7, error)
    back = wire.error_from_failure(failure)
    assert failure.slot == 7
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)


def test_an_unknown_error_and_an_unknown_reason_are_unavailable() -> None:
    failure = wire.failure_from_error(1, RuntimeError("out of memory"))
    back = wire.error_from_failure(failure)
    assert isinstance(back, Unavailable)
    assert str(back) == "out of memory"
    assert isinstance(wire.error_from_failure(stage_pb2.Failure(slot=1)), Unavailable)


@pytest.mark.parametrize(
    ("columns", "field"),
    [
        ({"slots": b"123"}, "slots"),
        ({"token_ids": b"123"}, "token_ids"),
        ({"slots": bytes(4)}, "outputs"),
        ({"slots": bytes(4), "token_ids": bytes(4), "finish_reasons": b"\x09"}, "finish_reasons"),
    ],
)
def test_torn_outputs_are_refused(columns: dict[str, bytes], field: str) -> None:
    outputs = stage_pb2.StepOutputs()
    for name, column in columns.items():
        setattr(outputs, name, column)
    with pytest.raises(InvalidRequest) as caught:
        step_outputs.tokens_from_outputs(outputs)
    assert caught.value.field == field


TORN_LOGPROBS = [
    ({"entry": 1}, "entry"),
    ({"top_ids": b"123", "top_logprobs": b"123"}, "top_ids"),
    ({"top_ids": bytes(8), "top_logprobs": bytes(4)}, "top_ids"),
]


@pytest.mark.parametrize(("fields", "field"), TORN_LOGPROBS)
def test_torn_logprobs_are_refused(fields: dict[str, Any], field: str) -> None:
    outputs = stage_pb2.StepOutputs(slots=bytes(4), token_ids=bytes(4), finish_reasons=b"\0")
    outputs.logprobs.add(**fields)
    with pytest.raises(InvalidRequest) as caught:
        step_outputs.logprobs_from_outputs(outputs)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"logprobs": bytes(4)}, "prompt_logprobs"),
        ({"logprobs": bytes(3), "ranks": bytes(3), "top_counts": bytes(3)}, "ranks"),
        ({"logprobs": bytes(4), "ranks": bytes(4), "top_counts": b"\1\0\0\0"}, "top_counts"),
        ({"top_ids": bytes(4), "top_logprobs": bytes(4)}, "top_counts"),
        ({"top_ids": bytes(4)}, "top_ids"),
    ],
)
def test_torn_prompt_logprobs_are_refused(fields: dict[str, bytes], field: str) -> None:
    outputs = stage_pb2.StepOutputs()
    outputs.prompt_logprobs.add(**fields)
    with pytest.raises(InvalidRequest) as caught:
        step_outputs.prompt_logprobs_from_outputs(outputs)
    assert caught.value.field == field


def test_a_score_of_no_entry_is_refused() -> None:
    outputs = stage_pb2.StepOutputs()
    outputs.scores.add(entry=0, score=1.0)
    with pytest.raises(InvalidRequest):
        step_outputs.scores_from_outputs(outputs)


@pytest.mark.parametrize("value", [-1, 2**32])
def test_a_token_id_that_is_no_u32(value: int) -> None:
    with pytest.raises(InvalidRequest):
        wire.pack_u32([value])
