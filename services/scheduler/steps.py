"""The step in flight: planned, written, dispatched; its masks; then drawn and applied, or failed.

Holds the core and its sampler. Which of these is called when is the loop's business.
"""

import logging
import operator
import time
from collections.abc import Callable
from dataclasses import dataclass

from triptych.engine_core.batch import UNKNOWN_DRAFT
from triptych.engine_core.errors import InvalidRequest, Unavailable
from triptych.engine_core.scheduler import Scheduler
from triptych.engine_core.step import StepOutput, StepPlan, StepResult
from triptych.services.runtime.activity import Watch
from triptych.services.scheduler.executor_link import ExecutorLink
from triptych.services.scheduler.sampler import StepSampler
from triptych.services.scheduler.stats import Counters
from triptych.services.transport import wire
from triptych.services.transport.rings import LogitsView, RingError, SlotPool
from triptych.v1 import stage_pb2

_NO_DRAFT = UNKNOWN_DRAFT - 1  # what core.drafts() has behind a sequence's last sample

_log = logging.getLogger(__name__)
_now = time.perf_counter


@dataclass(slots=True)
class _Flight:
    """The step that the executor computes. `prepared`: its masks are computed."""

    plan: StepPlan
    slot: int
    sent_at: float
    prepared: bool = False


class Steps:
    """One step at a time. Used by the loop's thread only. Outputs go to `outbox`."""

    def __init__(
        self,
        executor: ExecutorLink,
        num_slots: int,
        counters: Counters,
        outbox: list[StepOutput],
        watch: Watch,
        listened: Callable[[], float],
    ) -> None:
        """`watch` hears of the steps, at times of the loop's ListeningClock."""
        self._executor = executor
        self._counters = counters
        self._outbox = outbox
        self._watch = watch
        self._listened = listened
        self._flight: _Flight | None = None
        self.slots = SlotPool(num_slots)
        self.core: Scheduler | None = None
        self.sampler: StepSampler | None = None  # there is one when there is a core

    def serve(self, core: Scheduler, sampler: StepSampler) -> None:
        """The core to plan with from now on; no step is in flight."""
        assert self._flight is None, "a core is changed between steps"
        self.core, self.sampler = core, sampler

    def dispatch(self) -> None:
        """Send the next step, if there is one to be made and none in flight."""
        core = self.core
        if core is None or self._flight is not None or not self._executor.ready:
            return
        started = _now()
        plan = core.plan()
        if not plan:
            return
        planned = _now()
        slot = self.slots.lease()
        assert slot is not None, "one step in flight: a slot is free"
        core.write(plan, self._executor.step_slot(slot))
        written = _now()
        self._flight = _Flight(plan, slot, written)
        self._watch.step_began(self._listened())
        # False: the executor is gone. Its connection says so next, and the step is planned again.
        self._executor.dispatch(plan.step_id, slot)
        self._counters.times.plan += planned - started
        self._counters.times.write_inputs += written - planned

    def prepare(self) -> None:
        """Compute the masks of the step in flight, once, while the executor computes it."""
        flight, core, sampler = self._flight, self.core, self.sampler
        if flight is None or flight.prepared or core is None or sampler is None:
            return
        flight.prepared = True
        if sampler.num_grammars:
            started = _now()
            sampler.prepare(core.samples()[0], core.drafts())
            self._counters.times.masks += _now() - started

    def finish(self, done: stage_pb2.StepDone) -> str | None:
        """Take in a step that was computed. Returns what is wrong with the executor's word."""
        flight, core = self._flight, self.core
        if flight is None or core is None or done.step_id != flight.plan.step_id:
            return None  # the late word of an executor that had been lost
        received, plan, times = _now(), flight.plan, self._counters.times
        try:
            core.fill_drafts(wire.unpack_u32(done.draft_token_ids, "draft_token_ids"))
            logits = self._executor.logits(flight.slot, plan.step_id, plan.num_logits)
        except (RingError, ValueError, InvalidRequest) as error:
            return str(error)
        result = self._sample(core, plan, logits)
        sampled = _now()
        output = core.apply(result)
        self._end(output)
        self._counters.steps += 1
        times.execute += done.execute_ns * 1e-9
        times.hops += max(0.0, received - flight.sent_at - done.execute_ns * 1e-9)
        times.sample += sampled - received
        times.apply += _now() - sampled
        return None

    def fail(self, failed: stage_pb2.StepFailed) -> None:
        """The executor could not compute the step: its sequences end."""
        flight, core = self._flight, self.core
        if flight is None or core is None or failed.step_id != flight.plan.step_id:
            return
        _log.error("step failed: %s", failed.message, extra={"step": failed.step_id})
        self._end(core.fail_step(Unavailable(f"the step failed: {failed.message}")))

    def lose(self) -> None:
        """The executor is gone, with the step in flight and its KV cache."""
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

    def _sample(self, core: Scheduler, plan: StepPlan, logits: LogitsView) -> StepResult:
        sampler = self.sampler
        assert sampler is not None, "there is a core"
        scores = [
            sampler.score(
                logits,
                range(score.logits_row, score.logits_row + score.num_positions),
                targets,
                top,
            )
            for score, targets, top in core.scores()
        ]
        if not plan.num_samples:
            return StepResult(plan.step_id, (), scores=scores)
        drafts = core.drafts()
        drawn = sampler.draw(logits, *core.samples(), drafts)
        drafted = len(drafts) - drafts.count(_NO_DRAFT)
        if drafted:
            self._counters.draft_tokens += drafted
            taken = sum(map(operator.eq, drawn.token_ids, drafts))
            self._counters.accepted_draft_tokens += taken
        return StepResult(
            plan.step_id, drawn.token_ids, drawn.logprobs, scores, drawn.errors, drawn.complete
        )

    def _end(self, output: StepOutput) -> None:
        self._land()
        self._watch.step_ended(self._listened())
        self._outbox.append(output)
        tokens, going_on = len(output.token_ids), output.finishes.count(0)
        self._counters.generated_tokens += tokens
        self._counters.requests_finished += tokens - going_on + len(output.failed)

    def _land(self) -> None:
        if self._flight is not None:
            self.slots.release(self._flight.slot)
            self._flight = None
