"""services/transport/wire.py: what a peer may send, and what it then means."""

import math

import pytest

from triptych.engine_core.errors import (
    InvalidRequest,
    NotFinite,
    QueueFull,
    RequestError,
    TooLong,
    Unavailable,
)
from triptych.engine_core.ids import RequestId
from triptych.services.transport import wire
from triptych.v1 import stage_pb2

ONE = RequestId(1)


def submit(**changes: object) -> stage_pb2.Submit:
    message = stage_pb2.Submit(
        slot=3,
        prompt_token_ids=wire.pack_u32([1, 2]),
        params=stage_pb2.SequenceParams(max_tokens=4, top_p=1.0),
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
    ],
)
def test_bad_values_name_their_field(changes: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        wire.request_from_submit(submit(**changes), ONE)
    assert caught.value.field == field


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
        Unavailable("no executor", 1000),
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
        wire.tokens_from_outputs(outputs)
    assert caught.value.field == field


@pytest.mark.parametrize("value", [-1, 2**32])
def test_a_token_id_that_is_no_u32(value: int) -> None:
    with pytest.raises(InvalidRequest):
        wire.pack_u32([value])
