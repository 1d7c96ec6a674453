"""The executor's loop: a step comes, is computed from the ring into the ring, and is answered.

It survives its scheduler: weights and KV memory stay, only the session is made anew.
"""

import logging
import os
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import zmq

from triptych.services.executor.backend import Backend, BackendFacts, PipelinedBackend
from triptych.services.executor.pipeline import Fatal, Pipeline
from triptych.services.executor.scheduler_link import Beats, SchedulerLink, Session
from triptych.services.executor.stats import Counters
from triptych.services.executor.step_answers import done, failed, words_of
from triptych.services.executor.step_inputs import StepInputs, StepInputsError
from triptych.services.runtime.run_dir import RunDir
from triptych.services.transport.channel import wake_descriptor
from triptych.services.transport.rings import RingError
from triptych.v1 import stage_pb2

if TYPE_CHECKING:  # loaded where there is one
    from triptych.services.executor.draft_model import DraftModel
    from triptych.services.executor.rank_group import RankGroup

_NO_LOGITS = np.zeros((1, 1), np.float32)  # of a rank whose logits nobody reads

_log = logging.getLogger(__name__)


def model_facts(facts: BackendFacts, fingerprint: str) -> stage_pb2.ModelFacts:
    """What the handshake says of the model."""
    return stage_pb2.ModelFacts(
        fingerprint=fingerprint,
        architecture=facts.architecture,
        vocabulary_size=facts.vocabulary_size,
        max_model_len=facts.max_model_len,
        block_size=facts.block_size,
        num_blocks=facts.num_blocks,
        num_host_blocks=facts.num_host_blocks,
    )


class Worker:
    """Serves one scheduler after the other until stopped."""

    def __init__(
        self,
        run_dir: RunDir,
        name: str,
        rank: int,
        heartbeat_interval: float,
        counters: Counters,
    ) -> None:
        self._run_dir = run_dir
        self._name = name
        self._rank = rank
        self._interval = heartbeat_interval
        self._counters = counters
        self._stopping = threading.Event()
        self._wake = wake_descriptor()
        self._fatal: Fatal | None = None
        self._session: Session | None = None

    @property
    def joined(self) -> bool:
        """Whether a scheduler has us."""
        return self._session is not None

    @property
    def step_waits(self) -> bool:
        """Whether a step has come that is not being computed yet. Any thread."""
        session = self._session
        return session is not None and session.step_waits()

    def stop(self) -> None:
        """End `run` after the step in flight. Any thread."""
        self._stopping.set()
        self._interrupt()

    def _interrupt(self) -> None:
        os.eventfd_write(self._wake, 1)

    def run(
        self,
        backend: Backend,
        fingerprint: str,
        draft: "DraftModel | None" = None,
        group: "RankGroup | None" = None,
    ) -> None:
        """Join schedulers and compute their steps until stopped. Raises StartupError if refused.

        `draft` guesses the unknown tokens of their steps; without one such a step fails. `group`
        are the ranks that compute every step together with this one.
        """
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        hello = stage_pb2.ExecutorHello(
            model=model_facts(backend.facts, fingerprint),
            rank=self._rank,
            has_draft_model=draft is not None,
            tensor_parallel_size=1 if group is None else group.size,
            draws_tokens=isinstance(backend, PipelinedBackend),
        )
        if group is not None:
            self._fatal = group.fail
        link = SchedulerLink(context, self._run_dir, self._name, hello)
        try:
            while (joined := link.join(self._stopping)) is not None:
                session, identity = joined
                _log.info("joined a scheduler", extra={"epoch": session.epoch})
                beats = Beats(context, self._run_dir, identity, self._interval, self._counters.beat)
                self._session = session
                if group is not None:
                    session.taken = group.begin_session(session.step_ring.inode)
                try:
                    if isinstance(backend, PipelinedBackend):
                        self._serve_ahead(session, backend)
                    else:
                        self._serve(session, backend, draft)
                finally:
                    self._session = None
                    if group is not None:
                        group.end_session()
                    beats.stop()
                    session.close()
                if not self._stopping.is_set():
                    _log.warning("the scheduler is gone; waiting for another")
        finally:
            context.destroy(linger=0)

    def _serve_ahead(self, session: Session, backend: PipelinedBackend) -> None:
        backend.reserve(session.step_ring.layout.max_tokens)
        Pipeline(session, backend, self._counters, self._interrupt, self._fatal).serve(self._wake)

    def _serve(self, session: Session, backend: Backend, draft: "DraftModel | None") -> None:
        layout = session.step_ring.layout
        backend.reserve(layout.max_tokens)
        if draft is not None:
            draft.reserve(layout.max_tokens, layout.max_rows)
        for ready in session.steps(self._wake):
            self._counters.watch.step_began(time.monotonic())
            answer = self._execute(session, backend, draft, ready)
            session.send(answer)
            self._counters.watch.step_ended(time.monotonic())

    def _execute(
        self,
        session: Session,
        backend: Backend,
        draft: "DraftModel | None",
        ready: stage_pb2.StepReady,
    ) -> stage_pb2.ExecutorMessage:
        started = time.perf_counter_ns()
        guesses = b""
        try:
            slot = session.step_ring.inputs(ready.slot, ready.step_id)
            inputs = StepInputs.view(slot, session.step_ring.layout)
            if draft is not None:
                inputs, guesses = self._guess(draft, inputs)
            ring = session.logits_ring
            backend.execute(inputs, _NO_LOGITS if ring is None else ring.logits(ready.slot))
            if ring is not None:
                ring.publish(ready.slot, ready.step_id, inputs.num_logits)
        except Exception as error:  # the top of a step: the scheduler decides what becomes of it
            _log.exception("step %d failed", ready.step_id)
            if self._fatal is not None and not isinstance(error, StepInputsError | RingError):
                self._fatal(f"step {ready.step_id} failed: {words_of(error)}")
            return failed(ready, words_of(error))
        elapsed = time.perf_counter_ns() - started
        self._counters.step_done(inputs.num_tokens, elapsed * 1e-9)
        return done(ready, elapsed, guesses)

    def _guess(self, draft: "DraftModel", inputs: StepInputs) -> tuple[StepInputs, bytes]:
        """The step with its unknown tokens guessed, and the guesses as they are answered."""
        started = time.perf_counter()
        inputs, guesses = draft.guess(inputs)
        self._counters.draft_done(len(guesses), time.perf_counter() - started)
        return inputs, guesses.astype("<u4").tobytes()
