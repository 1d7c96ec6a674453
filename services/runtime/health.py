"""grpc.health.v1: Check, List and Watch over one table that its owner sets synchronously.

grpcio-health-checking's servicer can only be set from a coroutine and its Watch streams never end,
so a watcher holds up `server.stop(grace)` for the whole grace. Here `close()` ends them.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_SERVING: int = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: int = health_pb2.HealthCheckResponse.NOT_SERVING
_SERVICE_UNKNOWN: int = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Health:
    """One serving state for "" and every service of a server. Not thread-safe: event loop only."""

    def __init__(self, service_names: Iterable[str], *, serving: bool = False) -> None:
        self._names = tuple(dict.fromkeys(("", *service_names)))
        self._serving = serving
        self._closed = False
        self._watchers: set[asyncio.Event] = set()

    @property
    def serving(self) -> bool:
        """What Check answers."""
        return self._serving

    def set_serving(self, serving: bool) -> None:
        """Tell the truth from now on; every watcher hears of a change."""
        if serving != self._serving and not self._closed:
            self._serving = serving
            self._wake()

    def close(self) -> None:
        """NOT_SERVING for good; every Watch stream says so and ends."""
        self._serving, self._closed = False, True
        self._wake()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the service."""
        health_pb2_grpc.add_HealthServicer_to_server(_HealthServicer(self), server)

    def status(self, service: str) -> int | None:
        """The wire value for a service name; None when there is no such service."""
        return self.statuses().get(service)

    def statuses(self) -> dict[str, int]:
        """The wire value of every name."""
        return dict.fromkeys(self._names, _SERVING if self._serving else _NOT_SERVING)

    async def watch(self, service: str) -> AsyncIterator[int]:
        """The state now and after every change, until `close()`. Misses states in between."""
        changed = asyncio.Event()
        self._watchers.add(changed)
        last: int | None = None
        try:
            while True:
                status = self.status(service)
                status = _SERVICE_UNKNOWN if status is None else status
                if status != last:
                    last = status
                    yield status
                    continue
                if self._closed:
                    return
                await changed.wait()
                changed.clear()
        finally:
            self._watchers.discard(changed)

    def _wake(self) -> None:
        for changed in self._watchers:
            changed.set()


class _HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # untyped base
    """The gRPC face of Health."""

    def __init__(self, health: Health) -> None:
        self._health = health

    async def Check(  # noqa: N802  # the rpc's name
        self,
        request: health_pb2.HealthCheckRequest,
        context: "grpc.aio.ServicerContext[object, object]",
    ) -> health_pb2.HealthCheckResponse:
        status = self._health.status(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return health_pb2.HealthCheckResponse(status=status)

    async def List(  # noqa: N802  # the rpc's name
        self,
        request: health_pb2.HealthListRequest,
        context: "grpc.aio.ServicerContext[object, object]",
    ) -> health_pb2.HealthListResponse:
        return health_pb2.HealthListResponse(
            statuses={
                name: health_pb2.HealthCheckResponse(status=status)
                for name, status in self._health.statuses().items()
            }
        )

    async def Watch(  # noqa: N802  # the rpc's name
        self,
        request: health_pb2.HealthCheckRequest,
        context: "grpc.aio.ServicerContext[object, object]",
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        async for status in self._health.watch(request.service):
            yield health_pb2.HealthCheckResponse(status=status)
