"""What a call can end with, made from gRPC's status and its google.rpc details.

TriptychError         `code` is gRPC's; also what has no class of its own (a message too large)
|-- InvalidRequest    a value out of its bound: `field`, `description`
|-- UnknownModel      a model that is not served: `model`
|-- DuplicateId       an id that a running request of the session has
|-- NotSupported      the served model cannot do this
|-- DeadlineExceeded  the deadline or a time-out of the request passed
|-- QueueFull         no room now: `retry_after`
|-- Unavailable       nothing answers, or a stage is down: `retry_after` where it was said
|-- SlowReader        the answer was not read fast enough
|-- Unauthenticated   no valid credentials, or not allowed
|-- Cancelled         by `cancel`, or because a stream or session was left
|-- InternalError     the engine's fault: `reason`, `error_id`
|-- ResumeMismatch    the answer could not be gone on with: told again, it differs
`-- SamplerError      an ExternalSampler that has no lease, or has ended: not of a call
"""

from collections.abc import Iterable
from typing import cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

_STATUS_TRAILER = "grpc-status-details-bin"
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class TriptychError(Exception):
    """A call that ended without its whole answer."""

    def __init__(
        self, message: str, code: grpc.StatusCode, *, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after = retry_after
        """Seconds to wait before the same call has a chance; None: nobody said so."""

    @property
    def message(self) -> str:
        """What the engine said."""
        return str(self)

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed later."""
        return False


class InvalidRequest(TriptychError):
    """A value that the caller must change."""

    def __init__(self, message: str, code: grpc.StatusCode, field: str, description: str) -> None:
        super().__init__(message, code)
        self.field = field
        """The name on the wire, dotted; "" where the engine named none."""
        self.description = description
        """The value and its bound."""


class UnknownModel(TriptychError):
    """The named model is not one of those served."""

    def __init__(self, message: str, code: grpc.StatusCode, model: str) -> None:
        super().__init__(message, code)
        self.model = model


class DuplicateId(TriptychError):
    """The id belongs to a running request of the same session."""


class NotSupported(TriptychError):
    """The served model lacks what the request needs."""


class DeadlineExceeded(TriptychError):
    """The deadline or a time-out passed; nothing of the request runs on."""


class QueueFull(TriptychError):
    """As many requests wait as the engine takes."""

    @property
    def retryable(self) -> bool:
        """True."""
        return True


class Unavailable(TriptychError):
    """Nothing answers, the connection broke, or a stage is starting, draining or down."""

    @property
    def retryable(self) -> bool:
        """True."""
        return True


class SlowReader(TriptychError):
    """More of the answer waited for its reader than engine or client hold."""


class Unauthenticated(TriptychError):
    """No valid credentials (UNAUTHENTICATED), or not allowed (PERMISSION_DENIED)."""


class Cancelled(TriptychError):
    """Cancelled on this side."""


class InternalError(TriptychError):
    """The engine's fault."""

    def __init__(self, message: str, code: grpc.StatusCode, reason: str, error_id: str) -> None:
        super().__init__(message, code)
        self.reason = reason
        """"NOT_FINITE", "INTERNAL_ERROR", ...; "" where the engine named none."""
        self.error_id = error_id
        """What the engine's log explains; may be ""."""


class ResumeMismatch(TriptychError):
    """After the connection broke, the engine told the answer differently: it cannot be gone on."""

    def __init__(self, message: str) -> None:
        super().__init__(message, grpc.StatusCode.DATA_LOSS)


class SamplerError(TriptychError):
    """An ExternalSampler that got no lease of the engine, or has ended; `__cause__` is what its
    `draw` raised."""

    def __init__(self, message: str) -> None:
        super().__init__(message, grpc.StatusCode.FAILED_PRECONDITION)


def cancelled() -> Cancelled:
    """The error of a call that this side has ended."""
    return Cancelled("cancelled", grpc.StatusCode.CANCELLED)


def deadline_exceeded() -> DeadlineExceeded:
    """The error of a call whose deadline passed on this side."""
    return DeadlineExceeded("the deadline passed", grpc.StatusCode.DEADLINE_EXCEEDED)


def cut_off() -> Unavailable:
    """The error of a stream that ended well, but without the end of its answer."""
    return Unavailable("the stream ended before its answer did", grpc.StatusCode.UNAVAILABLE)


def from_rpc_error(error: grpc.RpcError) -> TriptychError:
    """The typed error of a failed RPC, synchronous or asyncio."""
    # Of both kinds of RPC; the stubs know one.
    trailers = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    raw = next((value for key, value in trailers if key == _STATUS_TRAILER), b"")
    return from_status(error.code(), error.details() or error.code().name, raw)


def from_status(code: grpc.StatusCode | int, message: str, raw: str | bytes) -> TriptychError:
    """The typed error of a status; `raw` is a serialized google.rpc.Status, or empty."""
    if isinstance(code, int):
        code = _CODES.get(code, grpc.StatusCode.UNKNOWN)
    return _typed(code, message, _Details(raw))


class _Details:
    """The google.rpc details of a status, the first of each kind; all empty where it had none."""

    def __init__(self, raw: str | bytes) -> None:
        self.invalid = error_details_pb2.BadRequest()
        self.resource = error_details_pb2.ResourceInfo()
        self.info = error_details_pb2.ErrorInfo()
        retry = error_details_pb2.RetryInfo()
        self.retry_after: float | None = None
        status = status_pb2.Status()
        try:
            status.ParseFromString(raw if isinstance(raw, bytes) else raw.encode("latin-1"))
        except DecodeError:  # a proxy's: its code still says what to do
            return
        for detail in status.details:
            if detail.Unpack(retry):
                delay = retry.retry_delay
                self.retry_after = delay.seconds + delay.nanos / 1e9
            else:
                # Each says whether it is its own kind.
                _ = (
                    detail.Unpack(self.invalid)
                    or detail.Unpack(self.resource)
                    or detail.Unpack(self.info)
                )


def _typed(  # noqa: PLR0911  # a table
    code: grpc.StatusCode, message: str, details: _Details
) -> TriptychError:
    match code:
        case grpc.StatusCode.INVALID_ARGUMENT:
            first = next(iter(details.invalid.field_violations), None)
            named = (first.field, first.description) if first else ("", message)
            return InvalidRequest(message, code, *named)
        case grpc.StatusCode.NOT_FOUND:
            return UnknownModel(message, code, details.resource.resource_name)
        case grpc.StatusCode.ALREADY_EXISTS:
            return DuplicateId(message, code)
        case grpc.StatusCode.FAILED_PRECONDITION | grpc.StatusCode.UNIMPLEMENTED:
            return NotSupported(message, code)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(message, code)
        case grpc.StatusCode.UNAVAILABLE:
            return Unavailable(message, code, retry_after=details.retry_after)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            # As for every OTLP client: without RetryInfo it would be refused for ever.
            if details.retry_after is not None:
                return QueueFull(message, code, retry_after=details.retry_after)
            kind = SlowReader if details.info.reason == "SLOW_READER" else TriptychError
            return kind(message, code)
        case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
            return Unauthenticated(message, code)
        case grpc.StatusCode.CANCELLED:
            return Cancelled(message, code)
        case grpc.StatusCode.INTERNAL:
            info = details.info
            return InternalError(message, code, info.reason, info.metadata.get("error_id", ""))
        case _:
            return TriptychError(message, code)
