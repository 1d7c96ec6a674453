"""What the control sockets of a run directory say: health, and the facts behind the panel."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from triptych.services.runtime.run_dir import RunDir
from triptych.v1 import control_pb2, control_pb2_grpc

TOKENIZER = "tokenizer-0"
SCHEDULER = "scheduler"
EXECUTOR = "executor-0"
PROCESSES = (SCHEDULER, EXECUTOR, TOKENIZER)  # the order to start them in
STOP_ORDER = (TOKENIZER, SCHEDULER, EXECUTOR)  # the first one drains

_TIMEOUT = 2.0  # seconds; these calls are answered from memory


async def is_serving(run_dir: RunDir, name: str) -> bool:
    """Whether a process answers SERVING on its control socket; False while it is not there."""
    socket = run_dir.control_socket(name)
    if not socket.exists():
        return False
    # A channel of its own for each try: one that failed once waits seconds before it tries again.
    async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


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


async def read_all_stats(run_dir: RunDir) -> dict[str, control_pb2.StatsResponse]:
    """The Stats of the three processes, by name. Raises grpc.RpcError."""
    return {name: await read_stats(run_dir, name) for name in PROCESSES}
