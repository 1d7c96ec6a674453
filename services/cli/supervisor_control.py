"""The supervisor's own control socket: health of the whole engine, states, operators' calls."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from triptych.services.cli.cancellation import cancel
from triptych.services.cli.engine import SUPERVISOR, TOKENIZER, tokenizer_health
from triptych.services.cli.operations import Operations
from triptych.services.cli.stage import CRASH_LOOP, RESTARTING, STOPPED
from triptych.services.cli.supervisor import Supervisor
from triptych.services.runtime.control_server import ControlServer
from triptych.services.runtime.process_stats import process_stats
from triptych.services.runtime.run_dir import RunDir
from triptych.v1 import control_pb2

_AGAIN_SECONDS = 0.02
_AWAY = frozenset({RESTARTING, CRASH_LOOP, STOPPED})


class SupervisorControl:
    """SERVING while the tokenizer says that it serves, and no stage is away."""

    def __init__(self, run_dir: RunDir, supervisor: Supervisor, operations: Operations) -> None:
        self._run_dir = run_dir
        self._supervisor = supervisor
        self._server = ControlServer(run_dir, SUPERVISOR, self._stats, operations.calls())
        self._tokenizer_serves = False
        self._stopping = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve the control socket. Raises StartupError."""
        await self._server.start()
        watch = asyncio.create_task(self._watch_tokenizer())
        try:
            yield
        finally:
            await cancel(watch)
            await self._server.stop()

    def changed(self) -> None:
        """A stage's state is another."""
        stages = self._supervisor.states().stages
        away = any(stage.state in _AWAY for stage in stages)
        self._server.set_serving(self._tokenizer_serves and not away and not self._stopping)

    def stop_begins(self) -> None:
        """NOT_SERVING from now on."""
        self._stopping = True
        self.changed()

    def _stats(self) -> control_pb2.StatsResponse:
        return control_pb2.StatsResponse(
            process=process_stats(), supervisor=self._supervisor.states()
        )

    async def _watch_tokenizer(self) -> None:
        socket = self._run_dir.control_socket(TOKENIZER)
        while True:
            while not socket.exists():  # much cheaper than a channel for each look
                await asyncio.sleep(_AGAIN_SECONDS)
            try:
                async for serving in tokenizer_health(self._run_dir):
                    self._tokenizer_serves = serving
                    self.changed()
            except grpc.aio.AioRpcError:
                pass  # it is not there
            self._tokenizer_serves = False
            self.changed()
            await asyncio.sleep(_AGAIN_SECONDS)
