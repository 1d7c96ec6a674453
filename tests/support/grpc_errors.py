"""Reading errors as a gRPC client does: status code, message, google.rpc details."""

from collections.abc import Callable
from typing import Protocol, cast

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status


class GrpcError(Protocol):
    """What grpc raises on the client: an RpcError that is the finished call too."""

    def code(self) -> grpc.StatusCode: ...

    def details(self) -> str: ...


def as_error(error: grpc.RpcError) -> GrpcError:
    """The error with the methods that it has at run time and not in its stubs."""
    return cast(GrpcError, error)


def refused(call: Callable[[], object]) -> GrpcError:
    """Run a call that must fail; returns the error with code() and details()."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return as_error(caught.value)


def violations(error: GrpcError) -> dict[str, str]:
    """Field -> description of the error's BadRequest detail."""
    return {
        violation.field: violation.description
        for detail in _details(error, error_details_pb2.BadRequest)
        for violation in detail.field_violations
    }


def retry_delay(error: GrpcError) -> float | None:
    """Seconds of the error's RetryInfo detail."""
    for detail in _details(error, error_details_pb2.RetryInfo):
        delay = detail.retry_delay
        return float(delay.seconds + delay.nanos / 1e9)
    return None


def _details(error: GrpcError, kind: type) -> list:  # type: ignore[type-arg]  # one message class
    status = rpc_status.from_call(error)
    out = []
    for packed in status.details if status is not None else ():
        message = kind()
        if packed.Unpack(message):
            out.append(message)
    return out
