"""What the routes need of the process, in one place."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from starlette.requests import Request

from triptych.engine_core.errors import RequestError
from triptych.services.tokenizer.admission import Admission
from triptych.services.tokenizer.generation import Generation
from triptych.services.tokenizer.openai_http.body import declared_size, read_body
from triptych.services.tokenizer.stats import Counters
from triptych.v1 import control_pb2

_MAX_LABEL_BYTES = 128


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """`keep_alive`: seconds of silence in a stream before a comment; sizes in bytes.

    `head_seconds`: a connection that has not sent a whole head by then is closed.
    `max_connections`: from so many on, requests are refused with 503.
    """

    max_body_bytes: int
    max_connections: int
    max_head_bytes: int = 64 << 10
    head_seconds: float = 30.0
    keep_alive: float = 15.0


class CanFail(Protocol):
    """A request that runs."""

    def fail(self, error: RequestError) -> None:
        """End it with an error."""


@dataclass(frozen=True, slots=True)
class Door:
    """The HTTP side of one tokenizer process.

    `reason`: why gRPC's health says NOT_SERVING, empty when it does not. `stats`: this process's.
    `scheduler_stats` asks the scheduler, and gives None when it does not answer soon. `open`: the
    generations that run now.
    """

    generation: Generation
    admission: Admission
    counters: Counters
    limits: HttpLimits
    reason: Callable[[], str]
    stats: Callable[[], control_pb2.StatsResponse]
    scheduler_stats: Callable[[], Awaitable[control_pb2.StatsResponse | None]]
    open: set[CanFail] = field(default_factory=set)

    async def body(self, request: Request) -> bytes:
        """The request's JSON. What is still coming counts among the open requests, too.

        Raises HttpRefusal, or what the admission raises.
        """
        most = self.limits.max_body_bytes
        with self.admission.admit(declared_size(request.headers, most)):
            return await read_body(request.stream(), most)


def label_of(request: Request) -> str:
    """X-Request-Id as a label for the logs, cut where it is too long for one."""
    given = request.headers.get("x-request-id", "")
    return given.encode()[:_MAX_LABEL_BYTES].decode(errors="ignore")
