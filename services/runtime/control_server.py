"""The control endpoint that every process has: health, reflection and ControlService.Stats.

It listens on a unix socket in the run directory, which only its user can reach.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future

import grpc

from triptych.services.runtime.health import Health
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.runtime.reflection import add_reflection
from triptych.services.runtime.run_dir import RunDir
from triptych.services.runtime.status import rpc_errors
from triptych.v1 import control_pb2, control_pb2_grpc

CONTROL_SERVICE: str = control_pb2.DESCRIPTOR.services_by_name["ControlService"].full_name
_STOP_GRACE = 0.5  # seconds; control calls are short

_log = logging.getLogger(__name__)


class ControlServer:
    """Serves one process's control socket on the running event loop, asyncio's or uvloop's.

    `stats` is called on the event loop, once per Stats call; it must not block. `flush_cache`
    begins to empty the prefix cache of a process that has one; its future says how many blocks
    that were. The caller holds
    `run_dir.lock(name)`, so a socket file that exists belongs to a process that is gone.
    """

    def __init__(
        self,
        run_dir: RunDir,
        name: str,
        stats: Callable[[], control_pb2.StatsResponse],
        flush_cache: Callable[[], "Future[int]"] | None = None,
    ) -> None:
        self._path = run_dir.control_socket(name)
        self._servicer = _ControlServicer(stats, flush_cache)
        self._health = Health((CONTROL_SERVICE,))
        self._server: grpc.aio.Server | None = None

    @property
    def target(self) -> str:
        """The gRPC target, as clients give it."""
        return f"unix:{self._path}"

    async def start(self) -> None:
        """Bind and serve; NOT_SERVING until `set_serving(True)`. Raises StartupError."""
        self._path.unlink(missing_ok=True)
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        control_pb2_grpc.add_ControlServiceServicer_to_server(self._servicer, server)
        self._health.add_to(server)
        add_reflection(server, (CONTROL_SERVICE,))
        try:
            server.add_insecure_port(self.target)
        except RuntimeError as error:
            raise StartupError(f"control socket {self._path} cannot be bound") from error
        await server.start()
        self._path.chmod(0o600)
        self._server = server
        _log.debug("control endpoint at %s", self.target)

    def set_serving(self, serving: bool) -> None:
        """What grpc.health.v1 says for "" and for ControlService."""
        self._health.set_serving(serving)

    async def stop(self) -> None:
        """End watchers, let short calls finish, remove the socket. Nothing when not started."""
        server, self._server = self._server, None
        if server is None:
            return
        self._health.close()
        await server.stop(_STOP_GRACE)
        self._path.unlink(missing_ok=True)


class _ControlServicer(control_pb2_grpc.ControlServiceServicer):
    """ControlService of one process."""

    def __init__(
        self,
        stats: Callable[[], control_pb2.StatsResponse],
        flush_cache: Callable[[], "Future[int]"] | None,
    ) -> None:
        self._stats = stats
        self._flush_cache = flush_cache

    async def Stats(  # noqa: N802  # the rpc's name
        self,
        request: control_pb2.StatsRequest,
        context: "grpc.aio.ServicerContext[control_pb2.StatsRequest, control_pb2.StatsResponse]",
    ) -> control_pb2.StatsResponse:
        async with rpc_errors(context):
            return self._stats()

    async def FlushCache(  # noqa: N802  # the rpc's name
        self,
        request: control_pb2.FlushCacheRequest,
        context: (
            "grpc.aio.ServicerContext["
            "control_pb2.FlushCacheRequest, control_pb2.FlushCacheResponse]"
        ),
    ) -> control_pb2.FlushCacheResponse:
        if self._flush_cache is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this process has no prefix cache")
        async with rpc_errors(context):
            forgotten = await asyncio.wrap_future(self._flush_cache())
            return control_pb2.FlushCacheResponse(blocks_forgotten=forgotten)
