"""Runs a trace through the real scheduler, with a virtual clock in place of an executor.

A step takes as long as StepCost says. Requests that come meanwhile are submitted before the step is
applied, and time-outs pass in their turn, as in services/scheduler/loop.py. What is done here for
each step does not grow with the sequences that run: that work is all in engine_core and its twin.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from time import perf_counter
from typing import NamedTuple

import numpy as np

from triptych.engine_core.errors import QueueFull, TooLong
from triptych.engine_core.request import Request
from triptych.engine_core.sampling_params import SamplingParams
from triptych.engine_core.step import StepPlan, StepResult
from triptych.services.scheduler.deadlines import Deadlines, Limit
from triptych.services.simulator.arrivals import Arrival
from triptych.services.simulator.engine_shape import EngineShape
from triptych.services.simulator.fairness import FairnessWindows
from triptych.services.simulator.figures import Figures, SchedulerCost, Times
from triptych.services.simulator.ledger import SLOT_MASK, Ledger
from triptych.services.simulator.prompts import VOCABULARY, Prompts
from triptych.services.simulator.step_cost import StepCost

_DRAWN_TOGETHER = 1 << 16


class Progress(NamedTuple):
    """How far a simulation is."""

    requests: int
    steps: int
    virtual_s: float
    wall_s: float


class _Openings:
    """A SamplingState that notes who begins to run; a request's `choice` is its place."""

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.num_open = 0

    def open(
        self,
        sequence_id: int,
        params: SamplingParams,
        choice: int,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        salt: str = "",
    ) -> None:
        self.slots.append(choice)
        self.num_open += 1

    def append(self, sequence_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        pass

    def close(self, sequence_id: int) -> None:
        self.num_open -= 1

    def drafts(self) -> tuple[tuple[int, Sequence[int]], ...]:
        return ()

    def take(self) -> list[int]:
        """Those since the last call."""
        slots, self.slots = self.slots, []
        return slots


class _Draws:
    """Output tokens: a stream of Philox, cut as the steps need them."""

    def __init__(self, seed: int) -> None:
        key = np.array([seed, (1 << 63) + 1], np.uint64)
        self._random = np.random.Generator(np.random.Philox(key=key))
        self._drawn: array[int] = array("i")
        self._next = 0

    def take(self, count: int) -> "array[int]":
        if self._next + count > len(self._drawn):
            size = max(_DRAWN_TOGETHER, count)
            drawn = self._random.integers(VOCABULARY, size=size, dtype=np.int32)
            self._drawn, self._next = array("i", drawn.tobytes()), 0
        begin, self._next = self._next, self._next + count
        return self._drawn[begin : self._next]


class _Weighed:
    """Sums over time, each step weighing what it takes."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.held_slots = 0.0
        self.unused_slots = 0.0
        self.running = 0.0
        self.waiting = 0.0


@lru_cache(maxsize=4096)
def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens)


class Simulation:
    """One run. `watch` is called about every `watch_interval` seconds of wall-clock time."""

    def __init__(
        self,
        engine: EngineShape,
        cost: StepCost,
        *,
        seed: int = 0,
        fairness_window: float = 60.0,
        watch: Callable[[Progress], None] | None = None,
        watch_interval: float = 1.0,
    ) -> None:
        self._engine = engine
        self._cost = cost
        self._sampling = _Openings()
        self._scheduler = engine.build(self._sampling)
        self._fairness = FairnessWindows(fairness_window)
        self._ledger = Ledger(engine.capacity, self._fairness)
        self._deadlines = Deadlines(self._scheduler.lives)
        self._prompts = Prompts(seed, engine.max_model_len)
        self._draws = _Draws(seed)
        layout = engine.layout
        self._slot = memoryview(bytearray(layout.slot_bytes))
        offset, shape = layout.arrays["kv_lengths"]
        self._kv_lengths = np.frombuffer(self._slot, np.int32, shape[0], offset)
        self._weighed = _Weighed()
        self._now = 0.0
        self._steps = 0
        self._watch = watch
        self._watch_interval = watch_interval
        self._watch_at = 0.0
        self._began = 0.0
        self._submitting = 0.0
        self._parts = [0.0, 0.0, 0.0, 0.0]  # wall-clock seconds: plan, write, samples, apply

    def run(self, trace: Iterable[Arrival]) -> Figures:
        """Until the trace is over and everybody has left. Raises BadTrace; AssertionError where the
        scheduler is not as empty at the end as it was at the start."""
        self._began = perf_counter()
        self._watch_at = self._began + self._watch_interval
        arrivals = _Ahead(iter(trace))
        while True:
            self._come(arrivals)
            if self._step(arrivals):
                continue
            assert self._scheduler.num_requests == 0, "requests wait and no step is planned"
            if arrivals.next is None:
                break
            self._now = arrivals.next.at
        self._check_empty()
        return self._figures()

    def _step(self, arrivals: "_Ahead") -> bool:
        """One step, and all that happens while it runs. False if there was nothing to do."""
        scheduler, parts = self._scheduler, self._parts
        begin = perf_counter()
        plan = scheduler.plan()
        if not plan:
            return False
        planned = perf_counter()
        scheduler.write(plan, self._slot)
        written = perf_counter()
        self._steps += 1
        self._ledger.admitted(self._sampling.take(), self._now, self._steps)
        self._weigh(plan)
        self._come(arrivals)
        drawing = perf_counter()
        num_samples = len(scheduler.samples()[0])
        drawn = perf_counter()
        result = StepResult(plan.step_id, self._draws.take(num_samples))
        applying = perf_counter()
        output = scheduler.apply(result)
        end = perf_counter()
        assert not output.failed, "nothing fails in a simulation"
        self._ledger.started((each.request_id for each in output.started), self._now)
        self._ledger.emitted(output.request_ids, output.finishes, self._now)
        self._fairness.step_ends(self._now)
        parts[0] += planned - begin
        parts[1] += written - planned
        parts[2] += drawn - drawing
        parts[3] += end - applying
        if end >= self._watch_at:
            self._report(end)
        return True

    def _weigh(self, plan: StepPlan) -> None:
        """The clock goes on by the step; what is held is held for as long."""
        batch, weighed = self._scheduler.batch, self._weighed
        num_kv_tokens = int(self._kv_lengths[: plan.num_rows].sum())
        seconds = self._cost.seconds(plan.num_tokens, num_kv_tokens)
        held = (batch.num_blocks - batch.num_free_blocks) * batch.block_size
        weighed.seconds += seconds
        weighed.held_slots += seconds * held
        weighed.unused_slots += seconds * batch.num_unused_slots
        weighed.running += seconds * self._scheduler.num_running
        weighed.waiting += seconds * self._scheduler.num_waiting
        self._now += seconds

    def _come(self, arrivals: "_Ahead") -> None:
        """Requests that came, and time-outs that passed, up to now; each in its turn."""
        arrival = arrivals.next
        while arrival is not None and arrival.at <= self._now:
            self._expire(arrival.at)
            self._submit(arrival)
            arrival = arrivals.advance()
        self._expire(self._now)

    def _submit(self, arrival: Arrival) -> None:
        ledger, engine = self._ledger, self._engine
        request_id = ledger.new_id()
        prompt = self._prompts.of(ledger.totals.come, arrival)
        begin = perf_counter()
        request = Request(
            request_id,
            prompt,
            _params(arrival.num_output),
            arrival.priority,
            choice=request_id & SLOT_MASK,
            tenant=arrival.tenant,
        )
        try:
            self._scheduler.submit(request)
        except (TooLong, QueueFull) as error:
            ledger.refused(arrival, too_long=isinstance(error, TooLong))
            return
        finally:
            self._submitting += perf_counter() - begin
        ledger.accepted(arrival, self._steps)
        self._deadlines.add(request_id, arrival.at, Limit.QUEUE, engine.queue_timeout)
        self._deadlines.add(request_id, arrival.at, Limit.TOTAL, engine.request_timeout)

    def _expire(self, now: float) -> None:
        for deadline in self._deadlines.passed(now):
            request_id = deadline.request_id
            if deadline.limit is Limit.QUEUE and not self._scheduler.is_fresh(request_id):
                continue
            self._scheduler.abort(request_id)
            self._ledger.timed_out(request_id, deadline.at, self._steps)

    def _report(self, wall: float) -> None:
        self._watch_at = wall + self._watch_interval
        if self._watch is not None:
            come, elapsed = self._ledger.totals.come, wall - self._began
            self._watch(Progress(come, self._steps, self._now, elapsed))

    def _check_empty(self) -> None:
        """Everything is back at its start: blocks, places, maps."""
        scheduler, batch = self._scheduler, self._scheduler.batch
        scheduler.check()
        self._ledger.check_empty()
        assert scheduler.num_waiting == 0, "nobody waits at the end"
        assert batch.sequence_ids() == [], "nobody runs at the end"
        assert batch.num_free_blocks == batch.num_blocks, "every block is free at the end"
        assert self._sampling.num_open == 0, "nobody is open in the sampler at the end"

    def _figures(self) -> Figures:
        totals, weighed, batch = self._ledger.totals, self._weighed, self._scheduler.batch
        now, steps, busy = max(self._now, 1e-9), max(1, self._steps), max(weighed.seconds, 1e-9)
        plan, write, samples, apply = (1e6 * seconds / steps for seconds in self._parts)
        classes = self._ledger.classes.values()
        return Figures(
            requests=totals.come,
            done=totals.done,
            refused=totals.refused,
            refused_too_long=totals.refused_too_long,
            timed_out=totals.timed_out,
            steps=self._steps,
            prompt_tokens=totals.prompt_tokens,
            output_tokens=totals.output_tokens,
            virtual_s=self._now,
            busy_share=weighed.seconds / now,
            output_tokens_per_s=totals.output_tokens / now,
            kv_waste=weighed.unused_slots / max(weighed.held_slots, 1e-9),
            kv_used=weighed.held_slots / busy / (batch.num_blocks * batch.block_size),
            mean_running=weighed.running / busy,
            mean_waiting=weighed.waiting / busy,
            preemptions=self._scheduler.preemptions_total,
            prefix_hit_rate=batch.prefix_hits_total / max(1, batch.prefix_queries_total),
            queue=Times.of(totals.queue),
            ttft=Times.of(totals.ttft),
            total=Times.of(totals.total),
            fairness=self._fairness.index,
            fairness_windows=self._fairness.num_windows,
            scheduler=SchedulerCost(
                step_us=plan + write + samples + apply,
                plan_us=plan,
                write_us=write,
                samples_us=samples,
                apply_us=apply,
                submit_us=1e6 * self._submitting / max(1, totals.come),
            ),
            wall_s=perf_counter() - self._began,
            classes=tuple(sorted(classes, key=lambda each: -each.longest_wait_s)),
        )


class _Ahead:
    """An iterator of which the next one is known."""

    def __init__(self, arrivals: Iterator[Arrival]) -> None:
        self._arrivals = arrivals
        self.next = next(arrivals, None)

    def advance(self) -> Arrival | None:
        """To the one after it."""
        self.next = next(self._arrivals, None)
        return self.next
