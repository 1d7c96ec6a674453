"""The step loop: take messages, plan, dispatch, await, sample, apply, emit. On a thread of its own.

It owns the core and all sockets; other threads see snapshots only. It blocks in one poll over all
peers and never spins, so a Submit or an Abort is taken in while the executor computes. When a step
is done the next one is dispatched first, and its results are sent while the executor is busy again.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

import zmq

from triptych.engine_core.errors import DeadlinePassed, RequestError, Unavailable
from triptych.engine_core.ids import RequestId
from triptych.engine_core.scheduler import Scheduler
from triptych.engine_core.step import Failed, StepOutput, StepPlan, StepResult
from triptych.services.runtime.run_dir import RunDir
from triptych.services.scheduler.build import build_core, longest_sequence
from triptych.services.scheduler.deadlines import Deadlines, Limit
from triptych.services.scheduler.executor_link import ExecutorJoined, ExecutorLink, ExecutorLost
from triptych.services.scheduler.sampler import ProcessorFactory, StepSampler, new_sampler
from triptych.services.scheduler.settings import SchedulerSettings
from triptych.services.scheduler.stats import Counters, Snapshot, Totals, scheduler_stats, totals_of
from triptych.services.scheduler.tokenizer_link import Dropped, Submitted, TokenizerLink
from triptych.services.transport.channel import wake_descriptor
from triptych.services.transport.ring_layouts import step_layout
from triptych.services.transport.rings import LogitsView, RingError, SlotPool
from triptych.services.transport.silence import ListeningClock
from triptych.v1 import stage_pb2

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
        self,
        settings: SchedulerSettings,
        run_dir: RunDir,
        epoch: int,
        processors: Mapping[str, ProcessorFactory],
    ) -> None:
        self._settings = settings
        self._epoch = epoch
        self._processors = processors
        self._calls: deque[tuple[Callable[[], int], Future[int]]] = deque()
        self._stopping = threading.Event()
        self._wake = wake_descriptor()
        self._wake_lock = (
            threading.Lock()
        )  # its number may belong to another file once it is closed
        self._ended = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._poller.register(self._wake, zmq.POLLIN)
        self._rings = stage_pb2.ExecutorWelcome(
            epoch=epoch,
            num_slots=settings.num_slots,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_seqs=settings.max_num_seqs,
            max_logits=settings.logits_rows,
        )
        timeout = settings.heartbeat_timeout
        self._executor = ExecutorLink(self._context, run_dir, self._rings, self._poller, timeout)
        self._tokenizers = TokenizerLink(
            self._context, run_dir.scheduler_endpoint, epoch, self._poller, timeout
        )
        self._slots = SlotPool(settings.num_slots)
        self._core: Scheduler | None = None
        self._sampler: StepSampler | None = None  # there is one when there is a core
        self._deadlines = Deadlines(self._lives)
        self._facts: stage_pb2.ModelFacts | None = None
        self._flight: _Flight | None = None
        self._outbox: list[StepOutput] = []
        self._next_tick = 0.0
        self._listening = ListeningClock(settings.heartbeat_interval, _now())
        self._counters = Counters()
        self._totals_before = Totals()  # of the cores before this one
        self.snapshot = self._snapshot(_now())

    def stop(self) -> None:
        """End `run` at its next turn. Any thread."""
        self._stopping.set()
        self._wake_up()

    def forget_cache(self) -> "Future[int]":
        """No prompt is found in the prefix cache any more; the future has how many blocks could be
        found before. Any thread."""
        future: Future[int] = Future()
        self._calls.append((self._forget_cache, future))
        if not self._wake_up():
            future.cancel()
        return future

    def _wake_up(self) -> bool:
        """Let `run` take a turn; False when it has ended."""
        with self._wake_lock:
            if not self._ended:
                os.eventfd_write(self._wake, 1)
            return not self._ended

    def _forget_cache(self) -> int:
        if self._core is None:
            return 0
        cached = self._core.batch.num_cached_blocks
        self._core.forget_cache()
        return cached

    def run(self) -> None:
        """Serve until stopped; closes all sockets and rings. An exception is a bug."""
        try:
            while not self._stopping.is_set():
                self._turn()
        finally:
            self._executor.close()
            self._tokenizers.close()
            self._context.destroy(linger=0)
            with self._wake_lock:
                self._ended = True
                os.close(self._wake)
            while self._calls:
                self._calls.popleft()[1].cancel()

    def _turn(self) -> None:
        wait = max(0.0, self._wake_at() - _now())
        ready = self._poller.poll(int(wait * 1000) + 1)
        readable = {key for key, _ in ready if isinstance(key, int)}
        now = _now()
        listened = self._listening.at(now)
        if self._wake in readable:
            os.eventfd_read(self._wake)
        for event in self._executor.receive(readable, listened):
            self._take_executor(event)
        for request in self._tokenizers.receive(listened):
            self._take_tokenizer(request)
        if self._calls:
            self._answer_calls()
        if now >= self._next_tick:
            self._tick(now, listened)
        self._time_out(now)
        self._greet()
        self._dispatch()
        self._emit()
        self.snapshot = self._snapshot(_now())

    def _wake_at(self) -> float:
        next_at = self._deadlines.next_at
        return self._next_tick if next_at is None else min(next_at, self._next_tick)

    def _answer_calls(self) -> None:
        while self._calls:
            call, future = self._calls.popleft()
            # Who asked may be gone: its future is cancelled then, and takes no result.
            if future.set_running_or_notify_cancel():
                future.set_result(call())

    # -------------------------------------------------------------------------------- tokenizers

    def _take_tokenizer(self, event: Submitted | Dropped) -> None:
        match event:
            case Submitted():
                self._submit(event)
            case Dropped():
                self._drop([event])

    def _submit(self, event: Submitted) -> None:
        request, num_choices = event.request, event.request.params.n
        try:
            if self._core is None or self._sampler is None:
                raise Unavailable("no executor has joined")
            self._sampler.check(request.params)
            self._core.submit(request)
        except RequestError as error:
            self._counters.requests_refused += 1
            ids = range(request.request_id, request.request_id + num_choices)
            failed = [Failed(RequestId(each), error) for each in ids]
            self._outbox.append(StepOutput(0, failed=failed))
            return
        self._counters.prompt_tokens += len(request.prompt_token_ids)
        now, defaults = _now(), self._settings
        queue, total = event.queue_timeout, event.timeout
        for request_id in range(request.request_id, request.request_id + num_choices):
            choice = RequestId(request_id)
            queue_seconds = defaults.queue_timeout if queue is None else queue
            self._deadlines.add(choice, now, Limit.QUEUE, queue_seconds)
            total_seconds = defaults.request_timeout if total is None else total
            self._deadlines.add(choice, now, Limit.TOTAL, total_seconds)

    def _lives(self, request_id: RequestId) -> bool:
        return self._core is not None and self._core.lives(request_id)

    def _time_out(self, now: float) -> None:
        """End what has waited, or run, for too long. What never ran costs no step."""
        core = self._core
        if core is None:
            return
        failed = []
        for deadline in self._deadlines.passed(now):
            if deadline.limit is Limit.QUEUE and not core.is_fresh(deadline.request_id):
                continue
            core.abort(deadline.request_id)
            where = "in the queue" if deadline.limit is Limit.QUEUE else "in all"
            error = DeadlinePassed(f"{deadline.limit.value}: {deadline.seconds:g} s {where} passed")
            failed.append(Failed(deadline.request_id, error))
        if failed:
            self._counters.requests_timed_out += len(failed)
            self._counters.requests_finished += len(failed)
            self._outbox.append(StepOutput(0, failed=failed))

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
        for output in outbox:
            self._drop(self._tokenizers.emit(output))
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
        core, before_totals = self._core, self._totals_before
        self._totals_before = totals_of(core, before_totals)
        vocabulary_size = self._tokenizers.vocabulary_size
        assert vocabulary_size is not None
        resumed = core.resumable()
        self._core = self._new_core(facts, vocabulary_size)
        for request in resumed:
            try:
                self._core.submit(request)
            except RequestError as error:
                ids = range(request.request_id, request.request_id + request.params.n)
                self._counters.requests_finished += len(ids)
                failed = [Failed(RequestId(each), error) for each in ids]
                self._outbox.append(StepOutput(0, failed=failed))
        self._drop(self._tokenizers.pool_changed(facts, longest_sequence(facts)))

    def _new_core(self, facts: stage_pb2.ModelFacts, vocabulary_size: int) -> Scheduler:
        layout = step_layout(facts, self._rings)
        sampler = new_sampler(
            self._settings.engine_impl,
            vocabulary_size,
            processed_logprobs=self._settings.logprobs_mode == "processed_logprobs",
        )
        self._sampler = StepSampler(sampler, self._processors)
        return build_core(self._settings, facts, layout, vocabulary_size, self._sampler)

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
            logits = self._executor.logits(flight.slot, plan.step_id, plan.num_logits)
        except RingError as error:
            self._lose(self._executor.drop(str(error)).reason)
            return
        result = self._sample(core, plan, logits)
        sampled = _now()
        output = core.apply(result)
        self._land()
        self._outbox.append(output)
        self._count(output)
        self._counters.steps += 1
        times.execute += done.execute_ns * 1e-9
        times.hops += max(0.0, received - flight.sent_at - done.execute_ns * 1e-9)
        times.sample += sampled - received
        times.apply += _now() - sampled

    def _sample(self, core: Scheduler, plan: StepPlan, logits: LogitsView) -> StepResult:
        sampler = self._sampler
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
        drawn, errors = sampler.draw(logits, *core.samples())
        tokens = drawn.token_ids.tolist()
        return StepResult(plan.step_id, tokens, drawn.logprobs, scores, errors)

    def _fail_step(self, failed: stage_pb2.StepFailed) -> None:
        flight, core = self._flight, self._core
        if flight is None or core is None or failed.step_id != flight.plan.step_id:
            return
        _log.error("step failed: %s", failed.message, extra={"step": failed.step_id})
        output = core.fail_step(Unavailable(f"the step failed: {failed.message}"))
        self._land()
        self._outbox.append(output)
        self._count(output)

    def _count(self, output: StepOutput) -> None:
        tokens, going_on = len(output.token_ids), output.finishes.count(0)
        self._counters.generated_tokens += tokens
        self._counters.requests_finished += tokens - going_on + len(output.failed)

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
        stats = scheduler_stats(self._core, self._facts, self._counters, self._totals_before)
        stats.slots_total, stats.slots_free = self._slots.total, self._slots.free
        stats.requests_tracked = self._tokenizers.num_tracked
        stats.tokenizers_connected = self._tokenizers.num_peers
        stats.executor_ready = self._executor.ready
        stats.requests_refused_total += self._tokenizers.refused_total
        stats.epoch = self._epoch
        stats.impl = self._settings.engine_impl
        stats.max_num_seqs = self._settings.max_num_seqs
        stats.max_num_batched_tokens = self._settings.max_num_batched_tokens
        stuck = self._step_age(now) > self._settings.heartbeat_timeout
        return Snapshot(stats, serving=self._executor.ready and not stuck, taken_at=now)
