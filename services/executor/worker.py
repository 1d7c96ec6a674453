"""The executor's loop: a step comes, is computed from the ring into the ring, and is answered.

It survives its scheduler: weights and KV memory stay, only the session is made anew.
"""

import logging
import os
import threading
import time
from typing import TYPE_CHECKING

import zmq

from triptych.services.executor.backend import Backend, BackendFacts
from triptych.services.executor.scheduler_link import Beats, SchedulerLink, Session
from triptych.services.executor.stats import Counters
from triptych.services.executor.step_inputs import StepInputs
from triptych.services.runtime.run_dir import RunDir
from triptych.services.transport.channel import wake_descriptor
from triptych.v1 import stage_pb2

if TYPE_CHECKING:  # loaded where there is one
    from triptych.services.executor.draft_model import DraftModel

_MAX_MESSAGE = 1000  # characters of an exception that cross to the scheduler

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
        self.joined = False

    def stop(self) -> None:
        """End `run` after the step in flight. Any thread."""
        self._stopping.set()
        os.eventfd_write(self._wake, 1)

    def run(self, backend: Backend, fingerprint: str, draft: "DraftModel | None" = None) -> None:
        """Join schedulers and compute their steps until stopped. Raises StartupError if refused.

        `draft` guesses the unknown tokens of their steps; without one such a step fails.
        """
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        hello = stage_pb2.ExecutorHello(
            model=model_facts(backend.facts, fingerprint),
            rank=self._rank,
            has_draft_model=draft is not None,
        )
        link = SchedulerLink(context, self._run_dir, self._name, hello)
        try:
            while (joined := link.join(self._stopping)) is not None:
                session, identity = joined
                _log.info("joined a scheduler", extra={"epoch": session.epoch})
                beats = Beats(context, self._run_dir, identity, self._interval, self._counters.beat)
                self.joined = True
                try:
                    self._serve(session, backend, draft)
                finally:
                    self.joined = False
                    beats.stop()
                    session.close()
                if not self._stopping.is_set():
                    _log.warning("the scheduler is gone; waiting for another")
        finally:
            context.destroy(linger=0)

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
            backend.execute(inputs, session.logits_ring.logits(ready.slot))
            session.logits_ring.publish(ready.slot, ready.step_id, inputs.num_logits)
        except Exception as error:  # the top of a step: the scheduler decides what becomes of it
            _log.exception("step %d failed", ready.step_id)
            message = f"{type(error).__name__}: {error}"[:_MAX_MESSAGE]
            return stage_pb2.ExecutorMessage(
                failed=stage_pb2.StepFailed(
                    step_id=ready.step_id, slot=ready.slot, epoch=ready.epoch, message=message
                )
            )
        elapsed = time.perf_counter_ns() - started
        self._counters.step_done(inputs.num_tokens, elapsed * 1e-9)
        return stage_pb2.ExecutorMessage(
            done=stage_pb2.StepDone(
                step_id=ready.step_id,
                slot=ready.slot,
                epoch=ready.epoch,
                execute_ns=elapsed,
                draft_token_ids=guesses,
            )
        )

    def _guess(self, draft: "DraftModel", inputs: StepInputs) -> tuple[StepInputs, bytes]:
        """The step with its unknown tokens guessed, and the guesses as they are answered."""
        started = time.perf_counter()
        inputs, guesses = draft.guess(inputs)
        self._counters.draft_done(len(guesses), time.perf_counter() - started)
        return inputs, guesses.astype("<u4").tobytes()
