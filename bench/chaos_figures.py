"""What `make chaos` counts in the processes before, between and after: everything lent is back, no
file, ring or process is left behind, memory is flat."""

import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil

from triptych.v1 import control_pb2, control_pb2_grpc

sys.path.insert(0, str(Path(__file__).parent))
from chaos_killer import STAGES

SUPERVISOR, FORK_SERVER = "supervisor", "fork-server"
MEMORY_SHARE, MEMORY_BYTES = 0.10, 24 << 20
"""Resident memory may be above that of the start by this share and so many bytes.

Both are measured idle: at the start after every request of the pool has been answered once, at the
end in whatever process there is then, old or new. Allocators keep some of what they had: the slack
is what one process was seen to vary by from run to run, and what leaks at each of a hundred deaths
or a thousand streams is far above it.
"""
_OPEN_FILES_SLACK = 4
"""Descriptors that an idle process may hold more: gRPC's pollers come and go. A leak at each death
would be a hundred."""


@dataclass(frozen=True, slots=True)
class ProcessFigures:
    """Of one process. `born`: when it started, seconds since the epoch."""

    resident: int
    open_files: int
    ring_maps: int
    threads: int
    born: float


Figures = Mapping[str, ProcessFigures]


def figures_back(run_dir: Path, supervisor: int, patience: float) -> tuple[Figures, list[str]]:
    """Figures of all processes once the engine is idle, and what is not back after `patience` s."""
    until = time.monotonic() + patience
    while True:
        try:
            wrong = _lent(run_dir)
        except grpc.RpcError as error:
            wrong = [f"Stats: {error}"]
        if not wrong or time.monotonic() > until:
            break
        time.sleep(0.05)
    found: dict[str, ProcessFigures] = {SUPERVISOR: _figures(supervisor, 0)}
    for child in psutil.Process(supervisor).children():
        with suppress(psutil.NoSuchProcess):
            if child.name() == FORK_SERVER:
                found[FORK_SERVER] = _figures(child.pid, 0)
    for name in STAGES:
        try:
            process = _stats(run_dir, name).process
        except grpc.RpcError as error:
            wrong.append(f"Stats of {name}: {error}")
            continue
        found[name] = _figures(process.pid, process.ring_maps)
    return found, wrong


def compare(start: Figures, end: Figures) -> list[str]:
    """What has grown, or is missing."""
    wrong = [f"{name} is not there" for name in start if name not in end]
    for name, before in start.items():
        if name not in end:
            continue
        after = end[name]
        if after.open_files > before.open_files + _OPEN_FILES_SLACK:
            wrong.append(f"{name}: {after.open_files} open files, were {before.open_files}")
        if after.ring_maps != before.ring_maps:
            wrong.append(f"{name}: {after.ring_maps} ring maps, were {before.ring_maps}")
        if after.resident > memory_bound(before.resident):
            wrong.append(
                f"{name}: {after.resident >> 20} MiB resident, were {before.resident >> 20}"
            )
    return wrong


def memory_bound(resident: int) -> int:
    """How many resident bytes count as no more than `resident`."""
    return int(resident * (1 + MEMORY_SHARE)) + MEMORY_BYTES


def table(figures: Figures) -> str:
    """One line a process."""
    return "\n".join(
        f"    {name:12} {each.resident >> 20:5} MiB  {each.open_files:3} files"
        f"  {each.ring_maps} ring maps  {each.threads} threads"
        for name, each in figures.items()
    )


def _lent(run_dir: Path) -> list[str]:
    """What is not back. Raises grpc.RpcError."""
    scheduler = _stats(run_dir, "scheduler").scheduler
    tokenizer = _stats(run_dir, "tokenizer-0").tokenizer
    pairs = {
        "requests waiting": (scheduler.requests_waiting, 0),
        "requests running": (scheduler.requests_running, 0),
        "requests tracked": (scheduler.requests_tracked, 0),
        "grammars running": (scheduler.grammars_running, 0),
        "grammars waiting": (scheduler.grammars_waiting, 0),
        "free blocks": (scheduler.blocks_free, scheduler.blocks_total),
        "free slots": (scheduler.slots_free, scheduler.slots_total),
        "executor ready": (int(scheduler.executor_ready), 1),
        "streams of the tokenizer": (tokenizer.streams, 0),
        "requests of the tokenizer": (tokenizer.requests_running, 0),
    }
    return [f"{name} {is_now}, not {due}" for name, (is_now, due) in pairs.items() if is_now != due]


def _stats(run_dir: Path, name: str) -> control_pb2.StatsResponse:
    with grpc.insecure_channel(
        f"unix:{run_dir / f'{name}.control.sock'}",
        options=[("grpc.use_local_subchannel_pool", 1)],
    ) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        return stub.Stats(control_pb2.StatsRequest(), timeout=5)


def _figures(pid: int, ring_maps: int) -> ProcessFigures:
    process = psutil.Process(pid)
    with process.oneshot():
        return ProcessFigures(
            process.memory_info().rss,
            process.num_fds(),
            ring_maps,
            process.num_threads(),
            process.create_time(),
        )
