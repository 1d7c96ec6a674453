"""The step loop: take messages, plan, dispatch, await, sample, apply, emit. On a thread of its own.

It owns the core and all sockets; other threads see snapshots only. It blocks in one poll over all
peers and never spins, so a Submit or an Abort is taken in while the executor computes. When a step
is done the next one is dispatched first, its results are sent while the executor is busy again, and
then the grammars' masks for it are computed. What an executor gets ahead of that is in steps.py.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace

import zmq

from triptych.engine_core.handover import take_over
from triptych.engine_core.scheduler import Scheduler
from triptych.engine_core.step import StepOutput
from triptych.services.runtime.activity import Seen, Watch
from triptych.services.runtime.run_dir import RunDir
from triptych.services.runtime.silence import ListeningClock
from triptych.services.scheduler.build import build_core, longest_sequence
from triptych.services.scheduler.device_sampling import DeviceSampling
from triptych.services.scheduler.drafters import build_drafter
from triptych.services.scheduler.executor_link import ExecutorJoined, ExecutorLink, ExecutorLost
from triptych.services.scheduler.grammar_compiler import GrammarCompiler
from triptych.services.scheduler.grammars import Grammars
from triptych.services.scheduler.logits_processors import ProcessorFactory
from triptych.services.scheduler.sampler import StepSampler, new_sampler
from triptych.services.scheduler.sampler_link import SamplerLink
from triptych.services.scheduler.settings import SchedulerSettings
from triptych.services.scheduler.stats import (
    Counters,
    Snapshot,
    Totals,
    add_grammars,
    add_leases,
    scheduler_stats,
    totals_of,
)
from triptych.services.scheduler.steps import Steps
from triptych.services.scheduler.submissions import Submissions
from triptych.services.scheduler.tokenizer_link import (
    Dropped,
    Submitted,
    TokenizerLink,
)
from triptych.services.transport.channel import wake_descriptor
from triptych.services.transport.ring_layouts import step_layout
from triptych.services.transport.rings import SlotPool
from triptych.services.transport.vocabulary import Vocabulary
from triptych.v1 import stage_pb2

_log = logging.getLogger(__name__)
_now = time.perf_counter


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
        self._executor = ExecutorLink(
            self._context,
            run_dir,
            self._rings,
            self._poller,
            timeout,
            drafts_wanted=settings.speculative_method == "draft_model",
        )
        self._tokenizers = TokenizerLink(
            self._context, run_dir.scheduler_endpoint, epoch, self._poller, timeout
        )
        self._samplers = SamplerLink(
            run_dir, self._poller, epoch, settings.sampler_rows, settings.sampler_timeout
        )
        self._counters = Counters()
        self._outbox: list[StepOutput] = []
        self._compiler = GrammarCompiler(self._wake_up)
        self._grammars = Grammars(
            self._compiler,
            settings.structured_output_cache,
            settings.structured_output_cache_bytes,
        )
        self._submissions = Submissions(
            settings, self._grammars, self._samplers.leases, self._counters, self._outbox
        )
        self._listening = ListeningClock(settings.heartbeat_interval, _now())
        self._watch = Watch(timeout)
        self._steps = Steps(
            self._executor,
            self._samplers,
            SlotPool(settings.num_slots),
            self._counters,
            self._outbox,
            self._watch,
            self._listened,
            # Who guesses has to know the tokens.
            ahead=settings.async_scheduling and settings.speculative_method == "off",
        )
        self._facts: stage_pb2.ModelFacts | None = None
        self._next_tick = 0.0
        self._totals_before = Totals()  # of the cores before this one
        self.snapshot = self._snapshot()

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
        core = self._steps.core
        if core is None:
            return 0
        cached = core.batch.num_cached_blocks
        core.forget_cache()
        return cached

    def run(self) -> None:
        """Serve until stopped; closes all sockets and rings. An exception is a bug."""
        try:
            while not self._stopping.is_set():
                self._turn()
        finally:
            self._compiler.close()
            self._executor.close()
            self._samplers.close()
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
        listened = self._listened()
        if self._wake in readable:
            os.eventfd_read(self._wake)
        self._submissions.fail(self._samplers.receive(readable, listened))
        if self._samplers.num_drawn:
            self._steps.dispatch()  # before all else: the executor waits
        for event in self._executor.receive(readable, listened):
            self._take_executor(event)
        for request in self._tokenizers.receive(listened):
            self._take_tokenizer(request)
        if not self._samplers.alone:
            self._submissions.fail(self._samplers.expire(listened))
        if self._calls:
            self._answer_calls()
        if now >= self._next_tick:
            self._tick(now, listened)
        self._submissions.time_out(_now())
        self._submissions.take_compiled()
        self._submissions.take_claimed(_now())
        self._greet()
        if self._samplers.any_asked:
            self._submissions.fail(self._samplers.receive_asked(listened))
        self._steps.dispatch()
        self._emit()
        self._steps.prepare()
        self.snapshot = self._snapshot()

    def _listened(self) -> float:
        return self._listening.at(_now())

    def _wake_at(self) -> float:
        next_at = self._submissions.next_at
        soonest = self._next_tick if next_at is None else min(next_at, self._next_tick)
        if self._samplers.alone:
            return soonest
        times = [soonest]
        by_listening = (self._samplers.next_at, self._steps.retry_at)
        times += [_now() + each - self._listened() for each in by_listening if each is not None]
        return min(times)

    def _answer_calls(self) -> None:
        while self._calls:
            call, future = self._calls.popleft()
            # Who asked may be gone: its future is cancelled then, and takes no result.
            if future.set_running_or_notify_cancel():
                future.set_result(call())

    # -------------------------------------------------------------------------------- tokenizers

    def _take_tokenizer(self, event: Submitted | Dropped | Vocabulary) -> None:
        match event:
            case Submitted():
                self._submissions.submit(event, _now())
            case Dropped():
                self._submissions.drop([event])
            case Vocabulary():
                self._grammars.learn(event)

    def _greet(self) -> None:
        """Welcome the tokenizers that wait; the first one completes what a core must know."""
        if not self._executor.ready or self._facts is None:
            return
        self._submissions.drop(self._tokenizers.welcome(self._facts, longest_sequence(self._facts)))
        if self._steps.core is None and self._tokenizers.vocabulary_size is not None:
            self._serve(self._facts, self._tokenizers.vocabulary_size)

    def _emit(self) -> None:
        if not self._outbox:
            return
        started = _now()
        outbox = self._outbox[:]
        self._outbox.clear()
        for output in outbox:
            self._submissions.drop(self._tokenizers.emit(output))
        self._counters.times.emit += _now() - started

    # ---------------------------------------------------------------------------------- executor

    def _take_executor(
        self, event: ExecutorJoined | ExecutorLost | stage_pb2.StepDone | stage_pb2.StepFailed
    ) -> None:
        match event:
            case ExecutorJoined(facts, welcome):
                self._join(facts, welcome)
            case ExecutorLost(reason):
                self._lose(reason)
            case stage_pb2.StepDone():
                self._break_with(self._steps.finish(event))
                if self._samplers.any_asked:
                    self._submissions.fail(self._samplers.receive_asked(self._listened()))
                self._steps.dispatch()  # the next step before all else: the executor waits
                # Not behind all answers that are there: a quick executor has the next one ready.
                self._emit()
            case stage_pb2.StepFailed():
                self._break_with(self._steps.fail(event))

    def _break_with(self, wrong: str | None) -> None:
        """With an executor whose word was wrong; None: it was right."""
        if wrong is not None:
            self._lose(self._executor.drop(wrong).reason)

    def _join(self, facts: stage_pb2.ModelFacts, welcome: stage_pb2.ExecutorWelcome) -> None:
        before = (self._facts, self._rings)
        self._facts, self._rings = facts, welcome
        self._next_tick = 0.0  # beats tell the tokenizers at once
        self._watch.work(False, self._listened())  # what waits does so for steps from now on
        _log.info(
            "executor joined",
            extra={"num_blocks": facts.num_blocks, "block_size": facts.block_size},
        )
        core = self._steps.core
        if core is None or before == (facts, welcome):
            return
        # Another pool, or other rings: the sequences go on in a new core, from their tokens. What
        # has been sampled must be sent first, because the tokens sent are what they go on from.
        self._emit()
        self._totals_before = totals_of(core, self._totals_before)
        vocabulary_size = self._tokenizers.vocabulary_size
        assert vocabulary_size is not None
        output = take_over(self._serve(facts, vocabulary_size), core)
        if output.failed:
            self._counters.requests_finished += len(output.failed)
            self._outbox.append(output)
        self._submissions.drop(self._tokenizers.pool_changed(facts, longest_sequence(facts)))

    def _serve(self, facts: stage_pb2.ModelFacts, vocabulary_size: int) -> Scheduler:
        """With an empty core for this pool from now on."""
        layout = step_layout(facts, self._rings)
        processed = self._settings.logprobs_mode == "processed_logprobs"
        kernels = new_sampler(
            self._settings.engine_impl, vocabulary_size, processed_logprobs=processed
        )
        drafter = build_drafter(self._settings)
        device = None
        if layout.max_samples:
            device = DeviceSampling(layout, vocabulary_size, processed_logprobs=processed)
        sampler = StepSampler(kernels, self._processors, self._grammars, drafter, device)
        before = self._steps.core
        suspects = None if before is None else before.suspects  # the same choices go on
        core = build_core(self._settings, facts, layout, vocabulary_size, sampler, suspects)
        self._steps.serve(core, sampler)
        self._submissions.serve(core, sampler, _now())
        self._samplers.serve(facts.vocabulary_size, vocabulary_size)
        return core

    def _lose(self, reason: str) -> None:
        _log.warning("executor lost: %s", reason)
        self._next_tick = 0.0  # beats tell the tokenizers at once
        self._counters.executors_lost += 1
        self._steps.lose()

    # -------------------------------------------------------------------------------------- time

    def _tick(self, now: float, listened: float) -> None:
        interval = self._settings.heartbeat_interval
        self._next_tick = now + interval
        seen = self._seen()
        beat = stage_pb2.SchedulerBeat(
            epoch=self._epoch,
            executor_ready=self._executor.ready,
            step_age_ms=seen.step_age_ms,
            progress_age_ms=seen.progress_age_ms,
            activity=seen.activity,
        )
        self._executor.beat(beat)
        self._submissions.drop(self._tokenizers.beat(beat))
        for lost in self._executor.expire(listened):
            self._take_executor(lost)
        self._submissions.drop(self._tokenizers.expire(listened))
        self._grammars.prune(self._submissions.lives)
        self._samplers.leases.prune(self._submissions.lives)

    def _seen(self) -> Seen:
        """What the scheduler does. Without an executor it is not stuck: it waits for one; and idle
        where it waits for tokens from outside alone."""
        core, listened = self._steps.core, self._listened()
        self._watch.work(core is not None and core.num_requests > core.num_held, listened)
        seen = self._watch.at(listened)
        if seen.stuck and not self._executor.ready:
            return replace(seen, activity=stage_pb2.ACTIVITY_BUSY)
        return seen

    def _snapshot(self) -> Snapshot:
        stats = scheduler_stats(self._steps.core, self._facts, self._counters, self._totals_before)
        stats.slots_total, stats.slots_free = self._steps.slots.total, self._steps.slots.free
        stats.requests_tracked = self._tokenizers.num_tracked
        stats.tokenizers_connected = self._tokenizers.num_peers
        stats.executor_ready = self._executor.ready
        stats.requests_refused_total += self._tokenizers.refused_total
        stats.epoch = self._epoch
        stats.impl = self._settings.engine_impl
        stats.max_num_seqs = self._settings.max_num_seqs
        stats.max_num_batched_tokens = self._settings.max_num_batched_tokens
        sampler = self._steps.sampler
        stats.grammars_running = sampler.num_grammars if sampler is not None else 0
        stats.grammars_waiting = self._submissions.num_waiting
        add_grammars(stats, self._grammars)
        add_leases(stats, self._samplers.leases)
        seen = self._seen()
        return Snapshot(stats, seen, serving=self._executor.ready and not seen.stuck)
