"""The step loop: take messages, plan, dispatch, await, sample, apply, emit. On a thread of its own.

It owns the core and all sockets; other threads see snapshots only. It blocks in one poll over all
peers and never spins, so a Submit or an Abort is taken in while the executor computes. When a step
is done the next one is dispatched first, and its results are sent while the executor is busy again.
"""

import logging
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

import zmq

from triptych.engine_core.errors import RequestError, Unavailable
from triptych.engine_core.request import Request
from triptych.engine_core.scheduler import Scheduler
from triptych.engine_core.step import Event, Failed, StepPlan, StepResult, Token
from triptych.kernels.sample_columns import SampleTuple
from triptych.services.runtime.run_dir import RunDir
from triptych.services.scheduler.build import build_core, longest_sequence
from triptych.services.scheduler.executor_link import ExecutorJoined, ExecutorLink, ExecutorLost
from triptych.services.scheduler.sampler import SampleRows
from triptych.services.scheduler.settings import SchedulerSettings
from triptych.services.scheduler.stats import Counters, Snapshot
from triptych.services.scheduler.tokenizer_link import Dropped, Submitted, TokenizerLink
from triptych.services.transport.channel import wake_descriptor
from triptych.services.transport.ring_layouts import step_layout
from triptych.services.transport.rings import RingError, SlotPool
from triptych.services.transport.silence import ListeningClock
from triptych.v1 import control_pb2, stage_pb2

_log = logging.getLogger(__name__)
_now = time.perf_counter


@dataclass(frozen=True, slots=True)
class _Flight:
    """The step that the executor computes."""

    plan: StepPlan
    slot: int
    sent_at: float


class StepLoop:
    """Binds its sockets when made, for which the run directory's lock must be held."""

    def __init__(
        self, settings: SchedulerSettings, run_dir: RunDir, epoch: int, sampler: SampleRows
    ) -> None:
        self._settings = settings
        self._epoch = epoch
        self._sampler = sampler
        self._stopping = threading.Event()
        self._wake = wake_descriptor()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._poller.register(self._wake, zmq.POLLIN)
        self._rings = stage_pb2.ExecutorWelcome(
            epoch=epoch,
            num_slots=settings.num_slots,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_seqs=settings.max_num_seqs,
        )
        timeout = settings.heartbeat_timeout
        self._executor = ExecutorLink(self._context, run_dir, self._rings, self._poller, timeout)
        self._tokenizers = TokenizerLink(
            self._context, run_dir.scheduler_endpoint, epoch, self._poller, timeout
        )
        self._slots = SlotPool(settings.num_slots)
        self._core: Scheduler | None = None
        self._facts: stage_pb2.ModelFacts | None = None
        self._flight: _Flight | None = None
        self._outbox: list[tuple[int, list[Event]]] = []
        self._next_tick = 0.0
        self._listening = ListeningClock(settings.heartbeat_interval, _now())
        self._counters = Counters()
        self._preemptions_before = 0
        self.snapshot = self._snapshot(_now())

    def stop(self) -> None:
        """End `run` at its next turn. Any thread."""
        self._stopping.set()
        os.eventfd_write(self._wake, 1)

    def run(self) -> None:
        """Serve until stopped; closes all sockets and rings. An exception is a bug."""
        try:
            while not self._stopping.is_set():
                self._turn()
        finally:
            self._executor.close()
            self._tokenizers.close()
            self._context.destroy(linger=0)
            os.close(self._wake)

    def _turn(self) -> None:
        wait = max(0.0, self._next_tick - _now())
        ready = self._poller.poll(int(wait * 1000) + 1)
        readable = {key for key, _ in ready if isinstance(key, int)}
        now = _now()
        listened = self._listening.at(now)
        for event in self._executor.receive(readable, listened):
            self._take_executor(event)
        for request in self._tokenizers.receive(listened):
            self._take_tokenizer(request)
        if now >= self._next_tick:
            self._tick(now, listened)
        self._greet()
        self._dispatch()
        self._emit()
        self.snapshot = self._snapshot(_now())

    # -------------------------------------------------------------------------------- tokenizers

    def _take_tokenizer(self, event: Submitted | Dropped) -> None:
        match event:
            case Submitted(request):
                self._submit(request)
            case Dropped():
                self._drop([event])

    def _submit(self, request: Request) -> None:
        try:
            if self._core is None:
                raise Unavailable("no executor has joined")
            self._core.submit(request)
        except RequestError as error:
            self._counters.requests_refused += 1
            self._outbox.append((0, [Failed(request.request_id, error)]))
        else:
            self._counters.prompt_tokens += len(request.prompt_token_ids)

    def _drop(self, dropped: Iterable[Dropped]) -> None:
        for each in dropped:
            for request_id in each.request_ids:
                if self._core is not None and self._core.abort(request_id):
                    self._counters.requests_aborted += 1

    def _greet(self) -> None:
        """Welcome the tokenizers that wait; the first one completes what a core must know."""
        if not self._executor.ready or self._facts is None:
            return
        self._drop(self._tokenizers.welcome(self._facts, longest_sequence(self._facts)))
        if self._core is None and self._tokenizers.vocabulary_size is not None:
            self._core = self._new_core(self._facts, self._tokenizers.vocabulary_size)

    def _emit(self) -> None:
        if not self._outbox:
            return
        started = _now()
        outbox, self._outbox = self._outbox, []
        for step_id, events in outbox:
            self._drop(self._tokenizers.emit(step_id, events))
        self._counters.times.emit += _now() - started

    # ---------------------------------------------------------------------------------- executor

    def _take_executor(
        self, event: ExecutorJoined | ExecutorLost | stage_pb2.StepDone | stage_pb2.StepFailed
    ) -> None:
        match event:
            case ExecutorJoined(facts):
                self._join(facts)
            case ExecutorLost(reason):
                self._lose(reason)
            case stage_pb2.StepDone():
                self._finish_step(event)
                self._dispatch()  # the next step before all else: the executor waits
            case stage_pb2.StepFailed():
                self._fail_step(event)

    def _join(self, facts: stage_pb2.ModelFacts) -> None:
        before, self._facts = self._facts, facts
        self._next_tick = 0.0  # beats tell the tokenizers at once
        _log.info(
            "executor joined",
            extra={"num_blocks": facts.num_blocks, "block_size": facts.block_size},
        )
        if self._core is None or before is None or before.num_blocks == facts.num_blocks:
            return
        # Another pool: the sequences go on in a new core, from their tokens. What has been sampled
        # must be sent first, because the tokens sent are what they go on from.
        self._emit()
        self._preemptions_before += self._core.preemptions_total
        vocabulary_size = self._tokenizers.vocabulary_size
        assert vocabulary_size is not None
        self._core = self._new_core(facts, vocabulary_size)
        for request in self._tokenizers.resumed_requests():
            try:
                self._core.submit(request)
            except RequestError as error:
                self._counters.requests_finished += 1
                self._outbox.append((0, [Failed(request.request_id, error)]))
        self._drop(self._tokenizers.pool_changed(facts, longest_sequence(facts)))

    def _new_core(self, facts: stage_pb2.ModelFacts, vocabulary_size: int) -> Scheduler:
        layout = step_layout(facts, self._rings)
        return build_core(self._settings, facts, layout, vocabulary_size)

    def _lose(self, reason: str) -> None:
        _log.warning("executor lost: %s", reason)
        self._next_tick = 0.0  # beats tell the tokenizers at once
        self._land()
        if self._core is not None:
            self._core.lost()

    def _land(self) -> None:
        if self._flight is not None:
            self._slots.release(self._flight.slot)
            self._flight = None

    # -------------------------------------------------------------------------------------- step

    def _dispatch(self) -> None:
        core = self._core
        if core is None or self._flight is not None or not self._executor.ready:
            return
        started = _now()
        plan = core.plan()
        if not plan:
            return
        planned = _now()
        slot = self._slots.lease()
        assert slot is not None, "one step in flight: a slot is free"
        core.write(plan, self._executor.step_slot(slot))
        written = _now()
        self._flight = _Flight(plan, slot, written)
        # False: the executor is gone. Its connection says so next, and the step is planned again.
        self._executor.dispatch(plan.step_id, slot)
        self._counters.times.plan += planned - started
        self._counters.times.write_inputs += written - planned

    def _finish_step(self, done: stage_pb2.StepDone) -> None:
        flight, core = self._flight, self._core
        if flight is None or core is None or done.step_id != flight.plan.step_id:
            return  # the late word of an executor that had been lost
        received, plan, times = _now(), flight.plan, self._counters.times
        try:
            logits = self._executor.logits(flight.slot, plan.step_id, plan.num_samples)
        except RingError as error:
            self._lose(self._executor.drop(str(error)).reason)
            return
        assert self._tokenizers.vocabulary_size is not None, "there is a core"
        rows: list[SampleTuple] = [*core.sample_rows(plan)]
        drawn = self._sampler(logits, rows, self._tokenizers.vocabulary_size) if rows else []
        sampled = _now()
        events = core.apply(StepResult(plan.step_id, tuple(drawn)))
        self._land()
        self._outbox.append((plan.step_id, events))
        self._count(events)
        self._counters.steps += 1
        times.execute += done.execute_ns * 1e-9
        times.hops += max(0.0, received - flight.sent_at - done.execute_ns * 1e-9)
        times.sample += sampled - received
        times.apply += _now() - sampled

    def _fail_step(self, failed: stage_pb2.StepFailed) -> None:
        flight, core = self._flight, self._core
        if flight is None or core is None or failed.step_id != flight.plan.step_id:
            return
        _log.error("step failed: %s", failed.message, extra={"step": failed.step_id})
        error = Unavailable(f"the step failed: {failed.message}")
        events = core.fail_step(error)
        self._land()
        self._outbox.append((failed.step_id, events))
        self._count(events)

    def _count(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Token):
                self._counters.generated_tokens += 1
                self._counters.requests_finished += event.finish is not None
            else:
                self._counters.requests_finished += 1

    # -------------------------------------------------------------------------------------- time

    def _tick(self, now: float, listened: float) -> None:
        interval = self._settings.heartbeat_interval
        self._next_tick = now + interval
        beat = stage_pb2.SchedulerBeat(
            epoch=self._epoch,
            executor_ready=self._executor.ready,
            step_age_ms=int(self._step_age(now) * 1000),
        )
        self._executor.beat(beat)
        self._drop(self._tokenizers.beat(beat))
        for lost in self._executor.expire(listened):
            self._take_executor(lost)
        self._drop(self._tokenizers.expire(listened))

    def _step_age(self, now: float) -> float:
        return max(0.0, now - self._flight.sent_at) if self._flight is not None else 0.0

    def _snapshot(self, now: float) -> Snapshot:
        core, facts, counters = self._core, self._facts, self._counters
        before = self._preemptions_before
        num_blocks = facts.num_blocks if facts is not None else 0
        stats = control_pb2.SchedulerStats(
            requests_waiting=core.num_waiting if core else 0,
            requests_running=core.num_running if core else 0,
            blocks_total=num_blocks,
            blocks_free=core.num_free_blocks if core else num_blocks,
            block_size=facts.block_size if facts else 0,
            slots_total=self._slots.total,
            slots_free=self._slots.free,
            requests_tracked=self._tokenizers.num_tracked,
            tokenizers_connected=self._tokenizers.num_peers,
            executor_ready=self._executor.ready,
            steps_total=counters.steps,
            preemptions_total=before + (core.preemptions_total if core else 0),
            prompt_tokens_total=counters.prompt_tokens,
            generated_tokens_total=counters.generated_tokens,
            requests_finished_total=counters.requests_finished,
            requests_aborted_total=counters.requests_aborted,
            requests_refused_total=counters.requests_refused + self._tokenizers.refused_total,
            epoch=self._epoch,
            impl=self._settings.engine_impl,
            step_times=counters.times.message(),
            max_num_seqs=self._settings.max_num_seqs,
            max_num_batched_tokens=self._settings.max_num_batched_tokens,
        )
        stuck = self._step_age(now) > self._settings.heartbeat_timeout
        return Snapshot(stats, serving=self._executor.ready and not stuck, taken_at=now)
