"""Graphs of decode steps, one a bucket: captured from the largest on, so that all find room in what
the first one took."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from triptych.services.executor.device.buckets import Buckets
from triptych.services.executor.device.device import Device, Graph, Work

_PROGRESS_SECONDS = 5.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Graphs:
    """Graphs by number of rows, and what each took of the device's memory, largest graph first."""

    buckets: Buckets
    by_rows: dict[int, Graph]
    bytes_each: tuple[int, ...] = ()

    @classmethod
    def none(cls) -> "Graphs":
        """Every step runs eagerly."""
        return cls(Buckets(()), {})

    @property
    def num_bytes(self) -> int:
        """Of all."""
        return sum(self.bytes_each)

    def bucket_for(self, num_rows: int) -> int | None:
        """The rows of the graph that such a decode step replays; None where it runs eagerly."""
        return self.buckets.for_rows(num_rows)


def capture_graphs(device: Device, buckets: Buckets, work_of: Callable[[int], Work]) -> Graphs:
    """Capture work_of(rows) for each bucket. Raises DeviceMemoryError, DeviceError.

    Each work is run once first, so that its kernels are compiled: its inputs may be anything that
    is in range.
    """
    started = said = time.monotonic()
    graphs: dict[int, Graph] = {}
    taken: list[int] = []
    for size in sorted(buckets.sizes, reverse=True):
        work = work_of(size)
        device.run(work)
        device.synchronize()
        before = _taken(device)
        graphs[size] = device.capture(work)
        taken.append(max(0, _taken(device) - before))
        if time.monotonic() - said >= _PROGRESS_SECONDS:
            said = time.monotonic()
            _log.info("capturing graphs %d of %d", len(graphs), len(buckets.sizes))
    device.synchronize()
    if graphs:
        _log.info(
            "graphs captured",
            extra={
                "graphs": len(graphs),
                "largest": buckets.sizes[-1],
                "bytes": sum(taken),
                "seconds": time.monotonic() - started,
            },
        )
    return Graphs(buckets, graphs, tuple(taken))


def bytes_of_all(largest: Graphs, count: int) -> int:
    """What `count` graphs will take, by the largest ones: the first makes the pool that the others
    share, each of which takes at most what the second did."""
    if not count:
        return 0
    first, *others = largest.bytes_each
    return first + (count - 1) * max(others, default=0)


def _taken(device: Device) -> int:
    facts = device.memory()
    return facts.total - facts.free
