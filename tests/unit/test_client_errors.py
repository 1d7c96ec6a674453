"""Every error of the engine arrives as a type of its own, with what the engine said."""

import grpc
import pytest

from triptych.client.api import (
    DeadlineExceeded,
    DuplicateId,
    InternalError,
    InvalidRequest,
    NotSupported,
    QueueFull,
    SlowReader,
    TriptychError,
    Unauthenticated,
    Unavailable,
    UnknownModel,
)
from triptych.client.errors import from_status
from triptych.engine_core import errors as engine
from triptych.services.runtime.status import to_status, unexpected


def arrived(error: engine.RequestError) -> TriptychError:
    status = to_status(error)
    return from_status(status.code, status.message, status.SerializeToString())


def test_a_bad_value_names_its_field() -> None:
    error = arrived(engine.InvalidRequest("sampling_params.top_p", "1.5 is above 1"))
    assert type(error) is InvalidRequest
    assert (error.field, error.description) == ("sampling_params.top_p", "1.5 is above 1")
    assert error.code == grpc.StatusCode.INVALID_ARGUMENT
    assert not error.retryable


def test_no_room_says_when_to_come_again() -> None:
    for raised, kind in ((engine.QueueFull, QueueFull), (engine.Unavailable, Unavailable)):
        error = arrived(raised("later", retry_after_ms=1250))
        assert type(error) is kind
        assert error.retry_after == 1.25
        assert error.retryable


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (engine.DuplicateId("x"), DuplicateId),
        (engine.NotSupported("x"), NotSupported),
        (engine.DeadlinePassed("x"), DeadlineExceeded),
        (engine.SlowReader("x"), SlowReader),
    ],
)
def test_the_others(raised: engine.RequestError, kind: type[TriptychError]) -> None:
    error = arrived(raised)
    assert type(error) is kind
    assert error.message == "x"
    assert not error.retryable


def test_an_unknown_model_is_named() -> None:
    error = arrived(engine.UnknownModel("gpt", ("tiny",)))
    assert isinstance(error, UnknownModel)
    assert error.model == "gpt"


def test_the_engines_faults() -> None:
    error = arrived(engine.NotFinite("x"))
    assert isinstance(error, InternalError)
    assert error.reason == "NOT_FINITE"
    status = unexpected(ValueError("secret"))
    error = from_status(status.code, status.message, status.SerializeToString())
    assert isinstance(error, InternalError)
    assert error.error_id in status.message
    assert error.error_id


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, Unavailable),
        (grpc.StatusCode.UNAUTHENTICATED, Unauthenticated),
        (grpc.StatusCode.PERMISSION_DENIED, Unauthenticated),
        (grpc.StatusCode.UNIMPLEMENTED, NotSupported),
        (grpc.StatusCode.UNKNOWN, TriptychError),
    ],
)
@pytest.mark.parametrize("raw", [b"", b"\xff\xff no status"])
def test_a_status_without_readable_details(
    code: grpc.StatusCode, kind: type[TriptychError], raw: bytes
) -> None:
    error = from_status(code, "from a proxy", raw)
    assert type(error) is kind
    assert (error.code, error.message, error.retry_after) == (code, "from a proxy", None)


def test_a_message_that_is_too_large_is_not_tried_again() -> None:
    error = from_status(grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger", b"")
    assert type(error) is TriptychError
    assert not error.retryable
