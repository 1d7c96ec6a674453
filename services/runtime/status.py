"""engine_core.errors -> gRPC status with google.rpc details. The only place that knows the table.

| error                       | code                | details                     |
| InvalidRequest, TooLong     | INVALID_ARGUMENT    | BadRequest                  |
| UnknownModel                | NOT_FOUND           | ResourceInfo                |
| DuplicateId                 | ALREADY_EXISTS      | ErrorInfo                   |
| NotSupported                | FAILED_PRECONDITION | PreconditionFailure         |
| DeadlinePassed              | DEADLINE_EXCEEDED   | ErrorInfo                   |
| SlowReader                  | RESOURCE_EXHAUSTED  | ErrorInfo                   |
| QueueFull, NoRoom           | RESOURCE_EXHAUSTED  | RetryInfo and QuotaFailure  |
| Unavailable                 | UNAVAILABLE         | RetryInfo                   |
| NotFinite, FatalRequest,    | INTERNAL            | ErrorInfo                   |
| RequestError                |                     |                             |

Any other exception is our fault: INTERNAL with an opaque id that the log explains.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from triptych.engine_core.errors import (
    DeadlinePassed,
    DuplicateId,
    FatalRequest,
    InvalidRequest,
    NoRoom,
    NotFinite,
    NotSupported,
    RequestError,
    SlowReader,
    Unavailable,
    UnknownModel,
)

DOMAIN = "triptych"
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_MESSAGE_BYTES = 512  # sent thrice in headers, tripled there outside ASCII; 8 KiB is the soft limit

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")

_log = logging.getLogger(__name__)


def to_status(error: RequestError) -> status_pb2.Status:
    """The google.rpc.Status of a failed request, for trailers and for SessionError."""
    code, details = _code_and_details(error)
    status = status_pb2.Status(code=code, message=_shortened(error.message))
    for detail in details:
        status.details.add().Pack(detail)
    return status


def unexpected(error: Exception) -> status_pb2.Status:
    """INTERNAL, for an exception that nobody foresaw: logged here, the caller gets its id."""
    name = uuid.uuid4().hex
    _log.error("internal error %s", name, exc_info=error)
    status = status_pb2.Status(code=code_pb2.INTERNAL, message=f"internal error {name}")
    status.details.add().Pack(
        error_details_pb2.ErrorInfo(
            reason="INTERNAL_ERROR", domain=DOMAIN, metadata={"error_id": name}
        )
    )
    return status


@asynccontextmanager
async def rpc_errors(
    context: "grpc.aio.ServicerContext[_Request, _Response]",
) -> AsyncIterator[None]:
    """Around the body of every rpc: what it raises becomes the rpc's status."""
    try:
        try:
            yield
        except RequestError as error:
            await _abort(context, to_status(error))
        except (grpc.aio.AbortError, grpc.aio.InternalError):
            raise
        except Exception as error:  # the rpc's top: grpc would send the client its text
            await _abort(context, unexpected(error))
    except grpc.aio.InternalError as error:
        # Said to a client that is gone, or that gRPC itself has just answered.
        raise asyncio.CancelledError from error


async def _abort(
    context: "grpc.aio.ServicerContext[_Request, _Response]", status: status_pb2.Status
) -> None:
    trailers: list[tuple[str, str | bytes]] = [
        ("grpc-status-details-bin", status.SerializeToString())
    ]
    for detail in status.details:
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(retry):
            # For clients whose service config has a retry policy.
            trailers.append(("grpc-retry-pushback-ms", str(retry.retry_delay.ToMilliseconds())))
    await context.abort(_CODES[status.code], status.message, tuple(trailers))


def _code_and_details(error: RequestError) -> tuple[int, list[Message]]:  # noqa: PLR0911  # a table
    match error:
        case InvalidRequest():
            violation = error_details_pb2.BadRequest.FieldViolation(
                field=error.field, description=_shortened(error.description)
            )
            return code_pb2.INVALID_ARGUMENT, [
                error_details_pb2.BadRequest(field_violations=[violation])
            ]
        case UnknownModel():
            return code_pb2.NOT_FOUND, [
                error_details_pb2.ResourceInfo(
                    resource_type="model",
                    resource_name=_shortened(error.model),
                    description="ListModels names what is served.",
                )
            ]
        case DuplicateId():
            return code_pb2.ALREADY_EXISTS, [_info("DUPLICATE_ID")]
        case NotSupported():
            violation = error_details_pb2.PreconditionFailure.Violation(
                type="MODEL", description=_shortened(error.message)
            )
            return code_pb2.FAILED_PRECONDITION, [
                error_details_pb2.PreconditionFailure(violations=[violation])
            ]
        case DeadlinePassed():
            return code_pb2.DEADLINE_EXCEEDED, [_info("DEADLINE_PASSED")]
        case SlowReader():
            return code_pb2.RESOURCE_EXHAUSTED, [_info("SLOW_READER")]
        case Unavailable():
            return code_pb2.UNAVAILABLE, [_retry(error)]
        case NoRoom():
            violation = error_details_pb2.QuotaFailure.Violation(
                subject="requests", description=_shortened(error.message)
            )
            return code_pb2.RESOURCE_EXHAUSTED, [
                _retry(error),
                error_details_pb2.QuotaFailure(violations=[violation]),
            ]
        case NotFinite():
            return code_pb2.INTERNAL, [_info("NOT_FINITE")]
        case FatalRequest():
            return code_pb2.INTERNAL, [_info("FATAL_REQUEST")]
        case _:
            return code_pb2.INTERNAL, [_info("REQUEST_FAILED")]


def _retry(error: NoRoom) -> error_details_pb2.RetryInfo:
    delay = Duration()
    delay.FromMilliseconds(error.retry_after_ms)
    return error_details_pb2.RetryInfo(retry_delay=delay)


def _info(reason: str) -> error_details_pb2.ErrorInfo:
    return error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN)


def _shortened(text: str) -> str:
    raw = text.encode("utf-8", errors="replace")
    if len(raw) <= _MESSAGE_BYTES:
        return raw.decode()
    return raw[: _MESSAGE_BYTES - 3].decode(errors="ignore") + "..."
