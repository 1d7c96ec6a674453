"""engine_core.errors as HTTP answers in OpenAI's shape. The twin of runtime.status, for this door.

| error                       | status | type                      | code                    |
| InvalidRequest              | 400    | invalid_request_error     | invalid_value           |
| TooLong                     | 400    | invalid_request_error     | context_length_exceeded |
| NotSupported                | 400    | invalid_request_error     | not_supported           |
| UnknownModel                | 404    | invalid_request_error     | model_not_found         |
| DuplicateId                 | 409    | invalid_request_error     | duplicate_id            |
| NoRoom, QueueFull           | 429    | rate_limit_error          | queue_full              |
| SlowReader                  | 429    | rate_limit_error          | slow_reader             |
| FatalRequest                | 500    | server_error              | fatal_request           |
| NotFinite, RequestError     | 500    | server_error              | request_failed          |
| Unavailable                 | 503    | service_unavailable_error | unavailable             |
| DeadlinePassed              | 504    | timeout_error             | deadline_passed         |
| HttpRefusal                 | its own: 404, 405, 408, 413, 415                                   |

429 (but for slow_reader) and 503 say when to try again: Retry-After in whole seconds, and
retry-after-ms, which the openai package looks at first.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

from pydantic_core import to_json

from triptych.engine_core.errors import (
    DeadlinePassed,
    DuplicateId,
    FatalRequest,
    InvalidRequest,
    NoRoom,
    NotSupported,
    RequestError,
    SlowReader,
    TooLong,
    Unavailable,
    UnknownModel,
)
from triptych.services.runtime.status import unexpected

_INVALID = "invalid_request_error"
_MESSAGE_CHARACTERS = 1024
_PARAM_CHARACTERS = 128

# litellm and LangChain know the error by these words of its message, not by its code.
_TOO_LONG = " (context_length_exceeded: this model's maximum context length is passed)"


@dataclass(frozen=True, slots=True)
class HttpError:
    """An error answer. `retry_after_ms`: when the same request may succeed, if that is known."""

    status: int
    message: str
    kind: str = _INVALID
    param: str | None = None
    code: str | None = None
    retry_after_ms: int | None = None

    def body(self) -> bytes:
        """{"error": {...}} as JSON."""
        return to_json(self.as_json())

    def as_json(self) -> dict[str, object]:
        """The same, before it becomes text."""
        return {
            "error": {
                "message": _cut(self.message, _MESSAGE_CHARACTERS),
                "type": self.kind,
                "param": None if self.param is None else _cut(self.param, _PARAM_CHARACTERS),
                "code": self.code,
            }
        }

    def headers(self) -> dict[str, str]:
        """When to try again, if that is known."""
        if self.retry_after_ms is None:
            return {}
        return {
            "retry-after": str(max(1, ceil(self.retry_after_ms / 1000))),
            "retry-after-ms": str(self.retry_after_ms),
        }


class HttpRefusal(RequestError):
    """What only HTTP can refuse: a path, a method, a body."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.error = HttpError(status, message, code=code)


def http_error(error: Exception, names: Mapping[str, str] | None = None) -> HttpError:
    """The answer to what a request raised. `names`: what this API calls a field of gRPC's.

    Anything but a RequestError is our fault: logged under the id that the client gets.
    """
    match error:
        case HttpRefusal():
            return error.error
        case InvalidRequest():
            param = http_name(error.field, names or {})
            message, code = f"{param}: {error.description}", "invalid_value"
            if isinstance(error, TooLong):
                message, code = message + _TOO_LONG, "context_length_exceeded"
            return HttpError(400, message, param=param, code=code)
        case RequestError():
            return replace(_row(error), message=error.message)
        case _:
            status = unexpected(error)
            return HttpError(500, status.message, kind="server_error", code="internal_error")


def http_name(field: str, names: Mapping[str, str]) -> str:
    """A dotted field of the gRPC request as this API spells it.

    The first part is looked up in `names`; a name that ends in "." takes the rest along, and one
    with "[]" takes the index there. A whole dotted field in `names` counts first.
    """
    field = field.removeprefix("sampling_params.").replace("token_ids.ids", "token_ids")
    if "." in field and field in names:
        return names[field]
    ends = [at for at in (field.find("."), field.find("[")) if at >= 0]
    root, rest = (field[: min(ends)], field[min(ends) :]) if ends else (field, "")
    name = names.get(root)
    if name is None:
        return field
    if "[]" in name:
        if not rest:
            return name.partition("[]")[0]
        index, _, rest = rest.partition(".")
        name = name.replace("[]", index)
        rest = f".{rest}" if rest else ""
    return name[:-1] + rest if name.endswith(".") else name


def _row(error: RequestError) -> HttpError:  # noqa: PLR0911  # a table
    match error:
        case NotSupported():
            return HttpError(400, "", code="not_supported")
        case UnknownModel():
            return HttpError(404, "", param="model", code="model_not_found")
        case DuplicateId():
            return HttpError(409, "", code="duplicate_id")
        case DeadlinePassed():
            return HttpError(504, "", kind="timeout_error", code="deadline_passed")
        case SlowReader():
            return HttpError(429, "", kind="rate_limit_error", code="slow_reader")
        case Unavailable():
            return HttpError(
                503,
                "",
                kind="service_unavailable_error",
                code="unavailable",
                retry_after_ms=error.retry_after_ms,
            )
        case NoRoom():
            return HttpError(
                429,
                "",
                kind="rate_limit_error",
                code="queue_full",
                retry_after_ms=error.retry_after_ms,
            )
        case FatalRequest():
            return HttpError(500, "", kind="server_error", code="fatal_request")
        case _:
            return HttpError(500, "", kind="server_error", code="request_failed")


def _cut(text: str, most: int) -> str:
    text = text.encode(errors="replace").decode()  # no lone surrogates
    return text if len(text) <= most else text[: most - 3] + "..."
