"""How much of the machine others took while something was measured, and a process's memory."""

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

DISTURBED = 0.05
_TICKS = 100  # of a second: USER_HZ of /proc


def resident_bytes(pid: int) -> int:
    """VmRSS of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"process {pid} has no VmRSS")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, all its threads together."""
    return _ticks(pid) / _TICKS


class Disturbance:
    """A context; `share` is then the part of all cores' time that went to other processes."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self.share = 0.0

    def __enter__(self) -> Self:
        self._busy, self._own, self._start = _busy_ticks(), self._own_ticks(), time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        seconds = time.perf_counter() - self._start
        others = _busy_ticks() - self._busy - (self._own_ticks() - self._own)
        self.share = max(0.0, others / (seconds * _TICKS * _cores()))

    def _own_ticks(self) -> float:
        return time.process_time() * _TICKS + sum(_ticks(pid) for pid in self._pids)


def _busy_ticks() -> int:
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return sum(fields) - fields[3] - fields[4]  # all but idle and waiting


def _cores() -> int:
    lines = Path("/proc/stat").read_text().splitlines()
    return sum(line.startswith("cpu") for line in lines) - 1


def _ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])
