"""When requests time out: in the queue, in all, while compiling. The clock is the loop's."""

from collections.abc import Callable
from enum import Enum
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from triptych.engine_core.ids import RequestId

_SLACK = 1024


class Limit(Enum):
    """Which time-out."""

    QUEUE = "queue_timeout"
    TOTAL = "request_timeout"
    GRAMMAR = "structured_output_timeout"
    CALL = "deadline"


class Deadline(NamedTuple):
    """At `at` seconds of the caller's clock, after `seconds`."""

    at: float
    request_id: RequestId
    limit: Limit
    seconds: float


class Deadlines:
    """A heap. Entries of requests that ended go when they come up, or when they are most of it."""

    def __init__(self, lives: Callable[[RequestId], bool]) -> None:
        self._heap: list[tuple[float, int, Deadline]] = []
        self._count = 0
        self._lives = lives
        self._prune_at = _SLACK

    def add(self, request_id: RequestId, now: float, limit: Limit, seconds: float) -> None:
        """Watch a request that began at `now`. Nothing for 0 seconds."""
        if seconds <= 0:
            return
        deadline = Deadline(now + seconds, request_id, limit, seconds)
        heappush(self._heap, (deadline.at, self._count, deadline))
        self._count += 1
        if len(self._heap) >= self._prune_at:
            self._heap = [entry for entry in self._heap if self._lives(entry[2].request_id)]
            heapify(self._heap)
            self._prune_at = 2 * len(self._heap) + _SLACK

    def passed(self, now: float) -> list[Deadline]:
        """Those that have passed, of requests that live; each once."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            deadline = heappop(self._heap)[2]
            if self._lives(deadline.request_id):
                found.append(deadline)
        return found

    @property
    def next_at(self) -> float | None:
        """When the next one passes; None when nothing is watched."""
        return self._heap[0][0] if self._heap else None
