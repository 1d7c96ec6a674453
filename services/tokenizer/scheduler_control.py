"""Calls of the scheduler's control service, for what this process tells others of the engine."""

import grpc

from triptych.engine_core.errors import Unavailable
from triptych.services.runtime.run_dir import RunDir
from triptych.v1 import control_pb2, control_pb2_grpc

_TIMEOUT = 1.0


class SchedulerControl:
    """Over one channel, which is made at the first call. Event loop only."""

    def __init__(self, run_dir: RunDir) -> None:
        self._target = f"unix:{run_dir.control_socket('scheduler')}"
        self._channel: grpc.aio.Channel | None = None

    async def stats(self) -> control_pb2.StatsResponse | None:
        """None when it does not answer within a second."""
        try:
            return await self._stub().Stats(control_pb2.StatsRequest(), timeout=_TIMEOUT)
        except grpc.aio.AioRpcError:
            return None

    async def flush_cache(self) -> int:
        """Let it forget its prefix cache: how many blocks could be found before. Raises
        Unavailable."""
        request = control_pb2.FlushCacheRequest()
        try:
            answer = await self._stub().FlushCache(request, timeout=_TIMEOUT)
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"the scheduler does not answer: {error.details()}") from error
        return answer.blocks_forgotten

    def _stub(self) -> "control_pb2_grpc.ControlServiceAsyncStub":
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self._target)
        stub: control_pb2_grpc.ControlServiceAsyncStub
        stub = control_pb2_grpc.ControlServiceStub(self._channel)
        return stub

    async def close(self) -> None:
        """Close the channel."""
        if self._channel is not None:
            await self._channel.close()
