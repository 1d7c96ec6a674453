"""What the control sockets of a run directory say: health, and the facts behind the panel."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from triptych.services.runtime.run_dir import RunDir
from triptych.v1 import control_pb2, control_pb2_grpc

SUPERVISOR = "supervisor"
TOKENIZER = "tokenizer-0"
SCHEDULER = "scheduler"
EXECUTOR = "executor-0"
PROCESSES = (SCHEDULER, EXECUTOR, TOKENIZER)  # that every engine has

_TIMEOUT = 2.0  # seconds; these calls are answered from memory
_SOON = 0.01  # seconds
_RECONNECT_MS = 100  # one that is not there yet is there soon
_CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", _RECONNECT_MS),
    ("grpc.min_reconnect_backoff_ms", _RECONNECT_MS),
    ("grpc.max_reconnect_backoff_ms", _RECONNECT_MS),
    ("grpc.use_local_subchannel_pool", 1),  # nothing of an earlier life
)


def executors(size: int) -> tuple[str, ...]:
    """The names of so many ranks; the first is EXECUTOR."""
    return tuple(f"executor-{rank}" for rank in range(size))


def start_order(size: int) -> tuple[str, ...]:
    """An engine's processes, with so many executors."""
    return (SCHEDULER, *executors(size), TOKENIZER)


def stop_order(size: int) -> tuple[str, ...]:
    """The same; the first one drains."""
    return (TOKENIZER, SCHEDULER, *executors(size))


class ControlContact:
    """A kept channel to one life of a process: what the supervisor asks there."""

    def __init__(self, run_dir: RunDir, name: str) -> None:
        self._socket = run_dir.control_socket(name)
        self._channel = grpc.aio.insecure_channel(f"unix:{self._socket}", options=_CHANNEL_OPTIONS)
        self._stub = control_pb2_grpc.ControlServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def ready(self) -> bool:
        """Whether it has loaded and bound all that it needs for itself."""
        if not self._socket.exists():
            return False
        try:
            stats = await self._stub.Stats(control_pb2.StatsRequest(), timeout=_TIMEOUT)
        except grpc.aio.AioRpcError:
            return False
        return has_started(stats)

    async def until_serving(self) -> None:
        """Wait until it says of its health that it serves."""
        while True:
            # A channel that failed once waits before it tries again.
            while not self._socket.exists():
                await asyncio.sleep(_SOON)
            watch = self._health.Watch(health_pb2.HealthCheckRequest())
            try:
                async for answer in watch:
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            except grpc.aio.AioRpcError:
                await asyncio.sleep(_SOON)
            finally:
                watch.cancel()

    async def answers(self) -> bool:
        """Whether it answers; waits for as long as it may."""
        try:
            await self._stub.Stats(control_pb2.StatsRequest())
        except grpc.aio.AioRpcError:
            return False
        return True

    async def close(self) -> None:
        """Let go of the channel."""
        await self._channel.close()


def has_started(stats: control_pb2.StatsResponse) -> bool:
    """Whether a process has done its own part of the start, whatever the others do."""
    match stats.WhichOneof("service"):
        case "executor":
            return stats.executor.num_blocks > 0  # its weights are there
        case "tokenizer":
            return stats.tokenizer.address != ""
        case _:
            return True  # the scheduler has bound its sockets before its control socket


@asynccontextmanager
async def tokenizer_calls(
    run_dir: RunDir,
) -> "AsyncIterator[control_pb2_grpc.ControlServiceAsyncStub]":
    """The tokenizer's control calls."""
    target = f"unix:{run_dir.control_socket(TOKENIZER)}"
    async with grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS) as channel:
        yield control_pb2_grpc.ControlServiceStub(channel)


async def tokenizer_health(run_dir: RunDir) -> AsyncIterator[bool]:
    """Whether the tokenizer serves, now and at each change. Raises grpc.RpcError when it goes."""
    target = f"unix:{run_dir.control_socket(TOKENIZER)}"
    async with grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        async for answer in watch:
            yield answer.status == health_pb2.HealthCheckResponse.SERVING


async def read_stats(run_dir: RunDir, name: str) -> control_pb2.StatsResponse:
    """The Stats of a process. Raises grpc.RpcError when it does not answer."""
    async with grpc.aio.insecure_channel(f"unix:{run_dir.control_socket(name)}") as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        return await stub.Stats(control_pb2.StatsRequest(), timeout=_TIMEOUT)


async def read_load(run_dir: RunDir) -> tuple[int, int] | None:
    """Bytes of weights that the executor has read or packed, and in all; None when it does not."""
    if not run_dir.control_socket(EXECUTOR).exists():
        return None
    try:
        executor = (await read_stats(run_dir, EXECUTOR)).executor
    except grpc.aio.AioRpcError:
        return None
    total = executor.load_bytes_total
    return (executor.load_bytes_done, total) if total else None


async def read_all_stats(
    run_dir: RunDir, names: Sequence[str]
) -> dict[str, control_pb2.StatsResponse]:
    """The Stats of these processes, by name. Raises grpc.RpcError."""
    return {name: await read_stats(run_dir, name) for name in names}
