"""Who is in the engine, since when, and what became of them. O(1) a request, nothing a step."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from triptych.engine_core.ids import RequestId
from triptych.services.simulator.arrivals import Arrival
from triptych.services.simulator.fairness import MAX_TENANTS, FairnessWindows
from triptych.services.simulator.figures import ClassFigures
from triptych.services.simulator.quantiles import Quantiles
from triptych.services.simulator.trace_file import BadTrace

MAX_CLASSES = 4096
_SLOT_BITS = 21
SLOT_MASK = (1 << _SLOT_BITS) - 1
"""Of a request id: its place here. Columns of ids are cut to places without a look-up."""


@dataclass(slots=True)
class _Guest:
    at: float
    step: int
    num_prompt: int
    num_tokens: int  # prompt and output
    tenant: int
    figures: ClassFigures
    waits: bool = True


@dataclass(slots=True)
class Totals:
    """Over all requests that have come."""

    come: int = 0
    done: int = 0
    refused: int = 0
    refused_too_long: int = 0
    timed_out: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    queue: Quantiles = field(default_factory=Quantiles)
    ttft: Quantiles = field(default_factory=Quantiles)
    total: Quantiles = field(default_factory=Quantiles)


class Ledger:
    """`capacity` requests at once. Times are seconds, steps are counted by the caller."""

    def __init__(self, capacity: int, fairness: FairnessWindows) -> None:
        assert capacity <= SLOT_MASK, f"capacity: {capacity} is above {SLOT_MASK}"
        self.totals = Totals()
        self.classes: dict[tuple[str, int], ClassFigures] = {}
        self._capacity = capacity
        self._fairness = fairness
        self._tenants: dict[str, int] = {}
        self._guests: list[_Guest | None] = [None] * capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._tenant_of: NDArray[np.int32] = np.zeros(capacity, np.int32)

    def new_id(self) -> RequestId:
        """For the next to come: one that none has had, with a free place if there is one."""
        slot = self._free[-1] if self._free else 0
        return RequestId(self.totals.come << _SLOT_BITS | slot)

    def accepted(self, arrival: Arrival, step: int) -> None:
        """It came after so many steps had begun, and waits in the place of `new_id`."""
        self.totals.come += 1
        slot, figures = self._free.pop(), self._class(arrival)
        tenant = self._tenants.setdefault(arrival.tenant, len(self._tenants))
        if tenant >= MAX_TENANTS:
            raise BadTrace(f"tenant: more than {MAX_TENANTS} of them")
        num_tokens = arrival.num_prompt + arrival.num_output
        self._guests[slot] = _Guest(
            arrival.at, step, arrival.num_prompt, num_tokens, tenant, figures
        )
        self._tenant_of[slot] = tenant
        self._fairness.queued(tenant, num_tokens)

    def refused(self, arrival: Arrival, *, too_long: bool) -> None:
        """It came and was not let in."""
        self.totals.come += 1
        self.totals.refused += 1
        self.totals.refused_too_long += too_long
        self._class(arrival).refused += 1

    def admitted(self, slots: Iterable[int], now: float, step: int) -> None:
        """They run from `now` on, in the `step`-th step; those that did before are passed over."""
        for slot in slots:
            guest = self._guest(slot)
            if guest.waits:
                self.totals.queue.add(now - guest.at)
                self._waited(guest, now, step - 1)

    def emitted(self, request_ids: "array[int]", finishes: "array[int]", now: float) -> None:
        """Output tokens: columns of a StepOutput."""
        if not request_ids:
            return
        slots = np.frombuffer(request_ids, np.int64) & SLOT_MASK
        self.totals.output_tokens += len(slots)
        self._fairness.outputs(self._tenant_of[slots])
        for slot in slots[np.frombuffer(finishes, np.uint8) != 0].tolist():
            guest = self._leave(slot)
            self.totals.done += 1
            self.totals.total.add(now - guest.at)
            guest.figures.done += 1

    def started(self, request_ids: Iterable[int], now: float) -> None:
        """Their first tokens are out. Call it before `emitted`."""
        for request_id in request_ids:
            guest = self._guest(request_id & SLOT_MASK)
            self.totals.ttft.add(now - guest.at)
            self.totals.prompt_tokens += guest.num_prompt
            self._fairness.prompt(guest.tenant, guest.num_prompt)

    def timed_out(self, request_id: int, at: float, step: int) -> None:
        """It was ended after so many steps had begun."""
        guest = self._leave(request_id & SLOT_MASK)
        if guest.waits:
            self._waited(guest, at, step)
        self.totals.timed_out += 1
        guest.figures.timed_out += 1

    def check_empty(self) -> None:
        """Assert that everybody came, was counted once, and has left."""
        totals = self.totals
        ended = totals.done + totals.refused + totals.timed_out
        assert ended == totals.come, f"{totals.come} requests came, {ended} ended"
        assert sorted(self._free) == list(range(self._capacity)), "every place is free"
        assert not any(self._guests), "nobody is left"
        self._fairness.check_idle()

    def _waited(self, guest: _Guest, until: float, steps: int) -> None:
        guest.waits = False
        figures = guest.figures
        figures.longest_wait_s = max(figures.longest_wait_s, until - guest.at)
        figures.longest_wait_steps = max(figures.longest_wait_steps, steps - guest.step)
        self._fairness.unqueued(guest.tenant, guest.num_tokens)

    def _guest(self, slot: int) -> _Guest:
        guest = self._guests[slot]
        assert guest is not None, f"nobody is in place {slot}"
        return guest

    def _leave(self, slot: int) -> _Guest:
        guest = self._guest(slot)
        self._guests[slot] = None
        self._free.append(slot)
        return guest

    def _class(self, arrival: Arrival) -> ClassFigures:
        key = arrival.tenant, arrival.priority
        figures = self.classes.get(key)
        if figures is None:
            if len(self.classes) == MAX_CLASSES:
                raise BadTrace(f"tenant, priority: more than {MAX_CLASSES} pairs of them")
            figures = self.classes[key] = ClassFigures(*key)
        return figures
