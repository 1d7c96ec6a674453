"""Facts about this process, as ControlService.Stats reports them."""

import os
import time
from pathlib import Path

import psutil

import triptych
from triptych.services.runtime.activity import Seen
from triptych.v1 import control_pb2

RING_NAMES = ("triptych-step", "triptych-logits")
"""Names of the memfd regions that are mapped from one process into another."""


def process_stats(seen: Seen | None = None) -> control_pb2.ProcessStats:
    """Pid, version, age, resident bytes, open descriptors and mapped rings of this process; what
    it does, of one that makes steps."""
    process = psutil.Process()
    with process.oneshot():
        stats = control_pb2.ProcessStats(
            pid=os.getpid(),
            version=triptych.__version__,
            uptime_seconds=max(0.0, time.time() - process.create_time()),
            resident_bytes=process.memory_info().rss,
            open_files=process.num_fds(),
            ring_maps=count_ring_maps(),
        )
    if seen is not None:
        stats.activity = seen.activity
        stats.step_age_ms = seen.step_age_ms
        stats.progress_age_ms = seen.progress_age_ms
    return stats


def count_ring_maps(maps: Path = Path("/proc/self/maps")) -> int:
    """How many memory maps of the process are step or logits rings."""
    markers = tuple(f"/memfd:{name}" for name in RING_NAMES)
    with maps.open(encoding="utf-8", errors="replace") as lines:
        return sum(any(marker in line for marker in markers) for line in lines)
