"""Requests whose sampler a scheduler before this one had, and is not back yet.

They wait for their lease to be claimed, outside the core: those that had been accepted, and those
that come while the scheduler is young.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from triptych.engine_core.errors import InvalidRequest, QueueFull, RequestError, Unavailable
from triptych.engine_core.ids import RequestId
from triptych.services.scheduler.leases import Leases
from triptych.services.scheduler.tokenizer_link import Submitted


@dataclass(frozen=True, slots=True)
class Claimed:
    """A request that waits no more: it has its row, or `error` says why it ends."""

    submitted: Submitted
    error: RequestError | None


class LeaseQueue:
    """Used by the loop's thread only. Bounded by whoever adds; the clock is the caller's."""

    def __init__(self, leases: Leases, timeout: float) -> None:
        """`timeout`: seconds that a request may wait."""
        self._leases = leases
        self._timeout = timeout
        self._waiting: dict[RequestId, tuple[Submitted, float]] = {}  # until when; soonest first

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def add(self, submitted: Submitted, now: float) -> None:
        """A request without a row."""
        self._waiting[submitted.request.request_id] = submitted, now + self._timeout

    def lives(self, request_id: RequestId) -> bool:
        """Whether the request waits here."""
        return request_id in self._waiting

    def abort(self, request_id: RequestId) -> bool:
        """End a request; False if it does not wait here."""
        return self._waiting.pop(request_id, None) is not None

    @property
    def next_at(self) -> float | None:
        """When one has waited for too long; None while none waits."""
        for _, until in self._waiting.values():
            return until
        return None

    def release(self, lives: Callable[[RequestId], bool], now: float) -> Iterator[Claimed]:
        """Those that have their row now, and those that have waited for too long. `lives`: as for
        Leases.take."""
        without: set[int] = set()  # leases that have no row for those behind, either
        for request_id, (submitted, until) in [*self._waiting.items()]:
            external = submitted.request.params.external
            assert external is not None, "it waits for its sampler"
            if external.lease not in without:
                try:
                    self._leases.take(external.lease, request_id, lives)
                except (InvalidRequest, QueueFull):
                    without.add(external.lease)
                else:
                    del self._waiting[request_id]
                    yield Claimed(submitted, None)
                    continue
            if now >= until:
                gone = f"no sampler has come for the lease {external.lease}"
                error = Unavailable(f"{gone} in {self._timeout:g} s (sampler_timeout)")
                del self._waiting[request_id]
                yield Claimed(submitted, error)
