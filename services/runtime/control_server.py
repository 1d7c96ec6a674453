"""The control endpoint that every process has: health, reflection and ControlService.Stats.

It listens on a unix socket in the run directory, which only its user can reach.
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import grpc

from triptych.services.runtime.health import Health
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.runtime.reflection import add_reflection
from triptych.services.runtime.run_dir import RunDir
from triptych.services.runtime.status import rpc_errors
from triptych.v1 import control_pb2, control_pb2_grpc

CONTROL_SERVICE: str = control_pb2.DESCRIPTOR.services_by_name["ControlService"].full_name
_STOP_GRACE = 0.5  # seconds; control calls are short

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_Call = Callable[[_Request], Awaitable[_Response]]

_log = logging.getLogger(__name__)


class CallRefused(Exception):
    """An operator's call that cannot be carried out now, with the status that says so."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class ControlCalls:
    """What a process does when it is asked to; a call that is absent is UNIMPLEMENTED.

    Each runs on the server's event loop and is cancelled when the caller goes. It raises
    CallRefused, or a RequestError, for what the caller is to read.
    """

    flush_cache: _Call[control_pb2.FlushCacheRequest, control_pb2.FlushCacheResponse] | None = None
    drain: _Call[control_pb2.DrainRequest, control_pb2.DrainResponse] | None = None
    resume: _Call[control_pb2.ResumeRequest, control_pb2.ResumeResponse] | None = None
    restart_executor: (
        _Call[control_pb2.RestartExecutorRequest, control_pb2.RestartExecutorResponse] | None
    ) = None
    unload_model: _Call[control_pb2.UnloadModelRequest, control_pb2.UnloadModelResponse] | None = (
        None
    )
    load_model: _Call[control_pb2.LoadModelRequest, control_pb2.LoadModelResponse] | None = None


_NO_CALLS = ControlCalls()


class ControlServer:
    """Serves one process's control socket on the running event loop, asyncio's or uvloop's.

    `stats` is called on the event loop, once per Stats call; it must not block. The caller holds
    `run_dir.lock(name)`, so a socket file that exists belongs to a process that is gone.
    """

    def __init__(
        self,
        run_dir: RunDir,
        name: str,
        stats: Callable[[], control_pb2.StatsResponse],
        calls: ControlCalls = _NO_CALLS,
    ) -> None:
        self._path = run_dir.control_socket(name)
        self._servicer = _ControlServicer(name, stats, calls)
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


_Context = grpc.aio.ServicerContext


class _ControlServicer(control_pb2_grpc.ControlServiceServicer):
    """ControlService of one process. The methods have the rpcs' names."""

    def __init__(
        self, name: str, stats: Callable[[], control_pb2.StatsResponse], calls: ControlCalls
    ) -> None:
        self._name = name
        self._stats = stats
        self._calls = calls

    async def Stats(  # noqa: N802
        self,
        request: control_pb2.StatsRequest,
        context: "_Context[control_pb2.StatsRequest, control_pb2.StatsResponse]",
    ) -> control_pb2.StatsResponse:
        async with rpc_errors(context):
            return self._stats()

    async def FlushCache(  # noqa: N802
        self,
        request: control_pb2.FlushCacheRequest,
        context: "_Context[control_pb2.FlushCacheRequest, control_pb2.FlushCacheResponse]",
    ) -> control_pb2.FlushCacheResponse:
        return await self._answer(self._calls.flush_cache, request, context)

    async def Drain(  # noqa: N802
        self,
        request: control_pb2.DrainRequest,
        context: "_Context[control_pb2.DrainRequest, control_pb2.DrainResponse]",
    ) -> control_pb2.DrainResponse:
        return await self._answer(self._calls.drain, request, context)

    async def Resume(  # noqa: N802
        self,
        request: control_pb2.ResumeRequest,
        context: "_Context[control_pb2.ResumeRequest, control_pb2.ResumeResponse]",
    ) -> control_pb2.ResumeResponse:
        return await self._answer(self._calls.resume, request, context)

    async def RestartExecutor(  # noqa: N802
        self,
        request: control_pb2.RestartExecutorRequest,
        context: (
            "_Context[control_pb2.RestartExecutorRequest, control_pb2.RestartExecutorResponse]"
        ),
    ) -> control_pb2.RestartExecutorResponse:
        return await self._answer(self._calls.restart_executor, request, context)

    async def UnloadModel(  # noqa: N802
        self,
        request: control_pb2.UnloadModelRequest,
        context: "_Context[control_pb2.UnloadModelRequest, control_pb2.UnloadModelResponse]",
    ) -> control_pb2.UnloadModelResponse:
        return await self._answer(self._calls.unload_model, request, context)

    async def LoadModel(  # noqa: N802
        self,
        request: control_pb2.LoadModelRequest,
        context: "_Context[control_pb2.LoadModelRequest, control_pb2.LoadModelResponse]",
    ) -> control_pb2.LoadModelResponse:
        return await self._answer(self._calls.load_model, request, context)

    async def _answer(
        self,
        call: "_Call[_Request, _Response] | None",
        request: _Request,
        context: "_Context[_Request, _Response]",
    ) -> _Response:
        if call is None:
            await context.abort(
                grpc.StatusCode.UNIMPLEMENTED, f"{self._name} has no part in this call"
            )
        async with rpc_errors(context):
            try:
                return await call(request)
            except CallRefused as refused:
                await context.abort(refused.code, refused.message)
