"""The error-to-status table: total over the tree, and silent about what is ours alone."""

import logging
from collections.abc import Iterator
from typing import TypeVar

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from triptych.engine_core import errors
from triptych.services.runtime.status import to_status, unexpected

EXAMPLES: dict[type[errors.RequestError], tuple[errors.RequestError, grpc.StatusCode]] = {
    errors.RequestError: (errors.RequestError("failed"), grpc.StatusCode.INTERNAL),
    errors.InvalidRequest: (
        errors.InvalidRequest("sampling_params.top_p", "1.5 is not within 0 and 1"),
        grpc.StatusCode.INVALID_ARGUMENT,
    ),
    errors.TooLong: (
        errors.TooLong("sampling_params.max_tokens", "too many"),
        grpc.StatusCode.INVALID_ARGUMENT,
    ),
    errors.UnknownModel: (errors.UnknownModel("x", ("a", "b")), grpc.StatusCode.NOT_FOUND),
    errors.DuplicateId: (errors.DuplicateId("id 7 runs"), grpc.StatusCode.ALREADY_EXISTS),
    errors.NotSupported: (errors.NotSupported("no template"), grpc.StatusCode.FAILED_PRECONDITION),
    errors.DeadlinePassed: (errors.DeadlinePassed("late"), grpc.StatusCode.DEADLINE_EXCEEDED),
    errors.SlowReader: (errors.SlowReader("slow"), grpc.StatusCode.RESOURCE_EXHAUSTED),
    errors.NoRoom: (errors.NoRoom("full", 250), grpc.StatusCode.RESOURCE_EXHAUSTED),
    errors.QueueFull: (errors.QueueFull("full", 250), grpc.StatusCode.RESOURCE_EXHAUSTED),
    errors.Unavailable: (errors.Unavailable("starting", 250), grpc.StatusCode.UNAVAILABLE),
    errors.NotFinite: (errors.NotFinite("NaN"), grpc.StatusCode.INTERNAL),
    errors.FatalRequest: (errors.FatalRequest("it kills"), grpc.StatusCode.INTERNAL),
}


def tree(root: type[errors.RequestError]) -> Iterator[type[errors.RequestError]]:
    yield root
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:  # HTTP has refusals of its own, for HTTP only
            yield from tree(child)


MessageT = TypeVar("MessageT", bound=Message)


def detail(status: status_pb2.Status, kind: type[MessageT]) -> MessageT:
    message = kind()
    assert any(item.Unpack(message) for item in status.details), kind
    return message


@pytest.mark.parametrize("kind", list(tree(errors.RequestError)), ids=lambda kind: kind.__name__)
def test_every_error_has_a_row(kind: type[errors.RequestError]) -> None:
    error, code = EXAMPLES[kind]
    status = to_status(error)
    assert status.code == code.value[0]
    assert status.message == error.message
    assert status.details


def test_a_bad_field_is_named() -> None:
    status = to_status(EXAMPLES[errors.InvalidRequest][0])
    request = detail(status, error_details_pb2.BadRequest)
    assert request.field_violations[0].field == "sampling_params.top_p"
    assert request.field_violations[0].description == "1.5 is not within 0 and 1"


@pytest.mark.parametrize("kind", [errors.QueueFull, errors.Unavailable])
def test_no_room_says_when_to_retry(kind: type[errors.RequestError]) -> None:
    retry = detail(to_status(EXAMPLES[kind][0]), error_details_pb2.RetryInfo)
    assert retry.retry_delay.ToMilliseconds() == 250


def test_a_full_queue_names_the_quota() -> None:
    quota = detail(to_status(EXAMPLES[errors.QueueFull][0]), error_details_pb2.QuotaFailure)
    assert quota.violations[0].description == "full"


def test_an_unknown_model_is_named() -> None:
    info = detail(to_status(EXAMPLES[errors.UnknownModel][0]), error_details_pb2.ResourceInfo)
    assert (info.resource_type, info.resource_name) == ("model", "x")


def test_long_values_are_cut() -> None:
    status = to_status(errors.UnknownModel("é" * 100_000, ("a",)))
    assert len(status.SerializeToString()) < 8000
    status.message.encode()


def test_an_unforeseen_error_tells_an_id_only(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        status = unexpected(ValueError("a secret"))
    assert status.code == code_pb2.INTERNAL
    assert b"secret" not in status.SerializeToString()
    name = status.message.split()[-1]
    assert name in caplog.text
    assert "a secret" in caplog.text
