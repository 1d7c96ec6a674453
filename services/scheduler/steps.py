"""The steps in flight: planned, written, dispatched; masks; then drawn and applied, or failed.

One, and one ahead of it where the executor draws tokens: that one is planned and sent while the
first is computed, from tokens that only the executor knows by then. Steps end in the order in which
they were sent.

Holds the core and its sampler. Which of these is called when is the loop's business.
"""

import logging
import operator
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from triptych.engine_core.batch import UNKNOWN_DRAFT
from triptych.engine_core.errors import InvalidRequest, Unavailable
from triptych.engine_core.scheduler import Scheduler
from triptych.engine_core.step import StepOutput, StepPlan, StepResult
from triptych.kernels.sampler_params import NO_TOKEN
from triptych.services.runtime.activity import Watch
from triptych.services.scheduler.device_sampling import DeviceSamples, StepSamples
from triptych.services.scheduler.drawn_tokens import check_nothing_drawn, take_drawn
from triptych.services.scheduler.executor_link import ExecutorLink
from triptych.services.scheduler.sampler import StepSampler
from triptych.services.scheduler.sampler_link import SamplerLink
from triptych.services.scheduler.stats import Counters
from triptych.services.scheduler.step_results import (
    DeviceDraws,
    draw,
    prepare_masks,
    score_prompts,
)
from triptych.services.transport import wire
from triptych.services.transport.rings import LogitsView, RingError, SlotPool
from triptych.v1 import stage_pb2

_NO_DRAFT = UNKNOWN_DRAFT - 1  # what core.drafts() has behind a sequence's last sample
_MOST_IN_FLIGHT = 2
_HOST_SHARE = 8
"""Whoever is drawn here has no row in the step ahead, so gets a token every other step only: above
one in so many samples that is worse for all than the gap between two steps."""
_GATHERING_SHARE = 0.25
_GATHERING = 0.002
"""Of a step's time, and in seconds at most: for how long the next one waits for tokens of programs
that are as quick. Without it, requests of one program fall into two groups that never meet: the
tokens of each come while the other is computed."""
_PATIENCE = 0.02
"""Seconds for which sequences that wait for a token from outside keep their places, though others
wait to run who find none. Nearly all answers are there by then."""

_log = logging.getLogger(__name__)
_now = time.perf_counter


@dataclass(slots=True)
class _Flight:
    """A step that was sent. `asked`: what the device draws of it, None for nothing. `is_ahead`: it
    was sent behind another. `prepared`: its masks are computed."""

    plan: StepPlan
    slot: int
    sent_at: float
    asked: DeviceSamples | None
    is_ahead: bool
    prepared: bool = False


class Steps:
    """Used by the loop's thread only. Outputs go to `outbox`."""

    def __init__(
        self,
        executor: ExecutorLink,
        samplers: SamplerLink,
        slots: SlotPool,
        counters: Counters,
        outbox: list[StepOutput],
        watch: Watch,
        listened: Callable[[], float],
        *,
        ahead: bool,
    ) -> None:
        """`watch` hears of the steps, at times of the loop's ListeningClock. `ahead`: a step may be
        sent while another is computed."""
        self._executor = executor
        self._samplers = samplers
        self._counters = counters
        self._outbox = outbox
        self._watch = watch
        self._listened = listened
        self._may_be_ahead = ahead
        self._flights: deque[_Flight] = deque()  # in the order in which they were sent
        self._answered_at = 0.0
        self.slots = slots
        self._step_seconds = 0.0  # of the last one's computation
        self.retry_at: float | None = None  # when a step may be made that was put off
        self.core: Scheduler | None = None
        self.sampler: StepSampler | None = None  # there is one when there is a core

    def serve(self, core: Scheduler, sampler: StepSampler) -> None:
        """The core to plan with from now on; no step is in flight."""
        assert not self._flights, "a core is changed between steps"
        self.core, self.sampler = core, sampler

    def dispatch(self) -> None:
        """Send the next step, if there is one to be made and none in flight; and one ahead. Tokens
        that were drawn outside are taken in before."""
        core, sampler, flights = self.core, self.sampler, self._flights
        self.retry_at = None
        if core is None or sampler is None:
            return
        if not flights and self._samplers.num_drawn:
            self._take_tokens(core)
        if not self._executor.ready:
            return
        if not flights and not self._samplers.leases.num_out:
            self._send(core, sampler, core.plan)
        elif not flights and not self._gathers():
            self._make_room(core)
            patient_until = self._patient_until(core)
            patient = patient_until is not None
            self._send(core, sampler, lambda: core.plan(patient=patient))
            if not flights:
                self.retry_at = patient_until
        if self._may_be_ahead and self._executor.draws_tokens and len(flights) == 1:
            host_drawn = self._host_drawn(core, flights[0])
            if host_drawn is not None:
                self._send(core, sampler, lambda: core.plan_ahead(host_drawn))

    def _gathers(self) -> bool:
        """Whether tokens are expected from outside that the next step should wait for."""
        seconds = min(_GATHERING, _GATHERING_SHARE * self._step_seconds)
        self.retry_at = self._samplers.leases.expected_until(self._listened(), seconds)
        return self.retry_at is not None

    def _patient_until(self, core: Scheduler) -> float | None:
        asked_at = self._samplers.leases.asked_at
        if asked_at is None or not core.num_waiting:
            return None
        until = asked_at + _PATIENCE
        return until if self._listened() < until else None

    def _make_room(self, core: Scheduler) -> None:
        leases = self._samplers.leases
        if core.num_waiting:
            core.make_room(leases.slow(self._listened(), _PATIENCE))

    def _take_tokens(self, core: Scheduler) -> None:
        drawn = self._samplers.take_drawn()
        if drawn:
            output = core.take_tokens(drawn)
            self._counters.external_tokens += len(output.token_ids)
            self._put_out(output)

    def _host_drawn(self, core: Scheduler, flight: _Flight) -> set[int] | None:
        """Sequences whose tokens of the step in flight the executor will not know; None where
        there should be no step ahead."""
        if len(self._flights) >= _MOST_IN_FLIGHT or not self.slots.free:
            return None
        total, asked = flight.plan.num_samples, flight.asked
        if not total:
            return set()
        if asked is None or (total - asked.num_drawn) * _HOST_SHARE > total:
            return None
        ids, _ = core.samples()
        return {ids[sample] for sample in asked.host()}

    def _send(
        self, core: Scheduler, sampler: StepSampler, make_plan: Callable[[], StepPlan]
    ) -> None:
        started = _now()
        plan = make_plan()
        if not plan:
            return
        planned = _now()
        slot = self.slots.lease()
        assert slot is not None, "one slot more than steps in flight is free"
        inputs = self._executor.step_slot(slot)
        core.write(plan, inputs)
        is_ahead = bool(self._flights)
        asked = _write_samples(core, sampler, inputs, is_ahead=is_ahead)
        written = _now()
        self._flights.append(_Flight(plan, slot, written, asked, is_ahead))
        self._watch.step_began(self._listened())
        # False: the executor is gone. Its connection says so next, and the step is planned again.
        self._executor.dispatch(plan.step_id, slot)
        self._counters.steps_ahead += is_ahead
        self._counters.times.plan += planned - started
        self._counters.times.write_inputs += written - planned

    def prepare(self) -> None:
        """Compute the masks of the oldest step in flight, once, while the executor computes it."""
        core, sampler = self.core, self.sampler
        if not self._flights or core is None or sampler is None:
            return
        flight = self._flights[0]
        if flight.prepared:
            return
        flight.prepared = True
        if sampler.num_grammars:
            started = _now()
            prepare_masks(core, sampler, flight.asked)
            self._counters.times.masks += _now() - started

    def finish(self, done: stage_pb2.StepDone) -> str | None:
        """Take in a step that was computed. Returns what is wrong with the executor's word."""
        flight, core, sampler = self._oldest(), self.core, self.sampler
        if flight is None or core is None or sampler is None:
            return None
        if done.step_id != flight.plan.step_id:
            return self._out_of_turn(done.step_id)
        received, times = _now(), self._counters.times
        try:
            core.fill_drafts(wire.unpack_u32(done.draft_token_ids, "draft_token_ids"))
            device = self._drawn(done, flight)
            logits = self._logits(core, flight)
        except (RingError, ValueError, InvalidRequest) as error:
            return str(error)
        result = self._result(core, sampler, flight, logits, device)
        sampled = _now()
        output = core.apply(result)
        if flight.is_ahead:
            drawn = len(result.token_ids) - result.token_ids.count(NO_TOKEN)
            self._counters.wasted_tokens += max(0, drawn - len(output.token_ids))
        self._end(output)
        self._counters.steps += 1
        began = max(flight.sent_at, self._answered_at)
        self._answered_at = received
        self._step_seconds = done.execute_ns * 1e-9
        times.execute += self._step_seconds
        times.hops += max(0.0, received - began - done.execute_ns * 1e-9)
        times.sample += sampled - received
        times.apply += _now() - sampled
        return None

    def fail(self, failed: stage_pb2.StepFailed) -> str | None:
        """The executor could not compute the step: its sequences end. As `finish`."""
        flight, core = self._oldest(), self.core
        if flight is None or core is None:
            return None
        if failed.step_id != flight.plan.step_id:
            return self._out_of_turn(failed.step_id)
        _log.error("step failed: %s", failed.message, extra={"step": failed.step_id})
        self._end(core.fail_step(Unavailable(f"the step failed: {failed.message}")))
        return None

    def lose(self) -> None:
        """The executor is gone, with the steps in flight and its KV cache."""
        while self._flights:
            self._land()
        self._watch.steps_lost()
        if self.core is None:
            return
        fatal = self.core.lost()
        if fatal.failed:
            for failed in fatal.failed:
                _log.error("%s", failed.error, extra={"request": failed.request_id})
            self._counters.choices_fatal += len(fatal.failed)
            self._counters.requests_finished += len(fatal.failed)
            self._outbox.append(fatal)

    def _oldest(self) -> _Flight | None:
        return self._flights[0] if self._flights else None

    def _out_of_turn(self, step_id: int) -> str | None:
        """What is wrong with an answer that is not for the oldest step. One for a step that is not
        in flight is the late word of an executor that had been lost."""
        if any(flight.plan.step_id == step_id for flight in self._flights):
            return f"it answered step {step_id} before step {self._flights[0].plan.step_id}"
        return None

    def _drawn(self, done: stage_pb2.StepDone, flight: _Flight) -> DeviceDraws | None:
        """Raises ValueError unless the executor drew what it was asked for."""
        if flight.asked is None:
            check_nothing_drawn(done)
            return None
        return DeviceDraws(flight.asked, *take_drawn(done.drawn, flight.asked))

    def _logits(self, core: Scheduler, flight: _Flight) -> LogitsView | None:
        """None where all tokens are the device's and no row was wanted. Raises RingError."""
        asked, plan = flight.asked, flight.plan
        if asked is not None and asked.num_drawn == plan.num_samples and not core.scores():
            return None
        return self._executor.logits(flight.slot, plan.step_id, plan.num_logits)

    def _result(
        self,
        core: Scheduler,
        sampler: StepSampler,
        flight: _Flight,
        logits: LogitsView | None,
        device: DeviceDraws | None,
    ) -> StepResult:
        plan, counters = flight.plan, self._counters
        scores = score_prompts(core, sampler, logits)
        if not plan.num_samples:
            return StepResult(plan.step_id, (), scores=scores)
        drafts = core.drafts()
        by_device = 0
        if device is not None:
            by_device = plan.num_samples - device.token_ids.count(NO_TOKEN)
        drawn = draw(core, sampler, drafts, logits, device)
        counters.device_tokens += by_device
        outside = self._ask_outside(core, logits, drawn.token_ids)
        by_host = plan.num_samples - drawn.token_ids.count(NO_TOKEN) - by_device
        counters.host_tokens += by_host - outside
        drafted = len(drafts) - drafts.count(_NO_DRAFT)
        if drafted:
            counters.draft_tokens += drafted
            counters.accepted_draft_tokens += sum(map(operator.eq, drawn.token_ids, drafts))
        return StepResult(
            plan.step_id, drawn.token_ids, drawn.logprobs, scores, drawn.errors, drawn.complete
        )

    def _ask_outside(
        self, core: Scheduler, logits: LogitsView | None, token_ids: Sequence[int]
    ) -> int:
        """Have tokens drawn where that is not done here; how many of `token_ids` do not count for
        it."""
        samples = core.external_samples()
        if not samples:
            return 0
        assert logits is not None, "the executor does not draw them: their rows come to the ring"
        _, rows = core.samples()
        self._samplers.ask(samples, logits, rows, token_ids, self._listened())
        return sum(token_ids[each.sample] != NO_TOKEN for each in samples)

    def _end(self, output: StepOutput) -> None:
        self._land()
        self._watch.step_ended(self._listened())
        self._put_out(output)

    def _put_out(self, output: StepOutput) -> None:
        if not output.says_something:
            return
        self._outbox.append(output)
        tokens, going_on = len(output.token_ids), output.finishes.count(0)
        self._counters.generated_tokens += tokens
        self._counters.requests_finished += tokens - going_on + len(output.failed)

    def _land(self) -> None:
        self.slots.release(self._flights.popleft().slot)


def _write_samples(
    core: Scheduler, sampler: StepSampler, slot: memoryview, *, is_ahead: bool
) -> DeviceSamples | None:
    """How the samples of the step that was just written are drawn, into its slot."""
    device = sampler.device
    if device is None:
        return None
    if is_ahead:
        return device.write(slot, StepSamples(*core.samples_ahead()), core.scores_ahead())
    ids, rows = core.samples()
    scores = [score for score, *_ in core.scores()]
    return device.write(slot, StepSamples(ids, rows, drafts=core.drafts()), scores)
