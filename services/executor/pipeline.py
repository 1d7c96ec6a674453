"""The loop of a device that is given a step while it computes the one before.

The calling thread launches steps as they come; a thread of its own waits for each in turn and
answers it. Whatever happens, steps are answered in the order in which they came, each once.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

import numpy as np

from triptych.services.executor.backend import (
    DrawnColumns,
    LaunchedStep,
    Logits,
    PipelinedBackend,
)
from triptych.services.executor.device.errors import DeviceLostError
from triptych.services.executor.device_inputs import DeviceInputs
from triptych.services.executor.stats import Counters
from triptych.services.executor.step_answers import done, failed, words_of
from triptych.services.executor.step_inputs import StepInputs, StepInputsError
from triptych.services.transport.rings import LogitsRing, RingError, StepRing
from triptych.v1 import stage_pb2

IN_FLIGHT = 2
"""Steps that are launched and not answered, at most: one that is computed, one behind it."""

Fatal = Callable[[str], object]
"""Ends the process with these words, because a step that failed here did not fail elsewhere."""

_FAILED_BEFORE = "the step before it failed, whose tokens it needs"

_log = logging.getLogger(__name__)


class StepSource(Protocol):
    """The part of a session that the loop needs."""

    @property
    def step_ring(self) -> StepRing:
        """Inputs."""

    @property
    def logits_ring(self) -> LogitsRing | None:
        """Where logits go; None of a rank that has none."""

    def steps(self, wake: int) -> Iterator[stage_pb2.StepReady]:
        """Steps as they come, until there are no more."""

    def send(self, message: stage_pb2.ExecutorMessage) -> None:
        """Answer a step. Any one thread."""


@dataclass(slots=True)
class _Flight:
    """A step on its way; `failure` where it was not launched."""

    ready: stage_pb2.StepReady
    began: float
    launched: LaunchedStep | None = None
    failure: str | None = None
    tokens: int = 0
    published_rows: int | None = None  # of the logits slot, where the scheduler reads it
    refers_back: bool = False


class DeviceFailedError(Exception):
    """The device computes nothing more: only a new process helps."""


class Pipeline:
    """Serves one session."""

    def __init__(
        self,
        session: StepSource,
        backend: PipelinedBackend,
        counters: Counters,
        wake: Callable[[], None],
        fatal: Fatal | None = None,
    ) -> None:
        """`wake` ends the session's `steps`, from any thread. `fatal` is given where ranks compute
        together: any failure but that of inputs, which fail on all ranks alike, is then its."""
        self._session = session
        self._backend = backend
        self._counters = counters
        self._wake = wake
        self._fatal = fatal
        self._flights: SimpleQueue[_Flight | None] = SimpleQueue()
        self._room = threading.Semaphore(IN_FLIGHT)
        self._lost: BaseException | None = None
        self._over = threading.Event()  # set behind _lost
        logits = session.logits_ring
        self._no_logits: Logits = np.zeros((1, 1), np.float32)
        self._logits = (lambda slot: self._no_logits) if logits is None else logits.logits

    def serve(self, wake: int) -> None:
        """Compute the session's steps until there are no more, and all are answered.

        Raises DeviceFailedError.
        """
        session = self._session
        ring = session.logits_ring
        logits_memory = memoryview(b"") if ring is None else ring.memory
        self._backend.register(session.step_ring.memory, logits_memory)
        answering = threading.Thread(target=self._answer_all, name="answers", daemon=True)
        answering.start()
        try:
            self._launch_all(wake)
        finally:
            self._flights.put(None)
            answering.join()
            del logits_memory
            self._backend.unregister()
        if self._lost is not None:
            raise DeviceFailedError(str(self._lost)) from self._lost

    def _launch_all(self, wake: int) -> None:
        usable = True  # whether the step before was launched, so that the device has its tokens
        for ready in self._session.steps(wake):
            self._room.acquire()
            if self._over.is_set():
                return
            now = time.monotonic()
            self._counters.watch.step_began(now)
            flight = _Flight(ready, now)
            self._launch(flight, usable)
            usable = flight.launched is not None
            self._flights.put(flight)
            if self._over.is_set():
                return

    def _launch(self, flight: _Flight, usable: bool) -> None:
        ready, ring = flight.ready, self._session.step_ring
        try:
            slot = ring.inputs(ready.slot, ready.step_id)
            inputs = StepInputs.view(slot, ring.layout)
            device = DeviceInputs.view(slot, ring.layout)
            flight.tokens = inputs.num_tokens
            flight.refers_back = inputs.refers_back or device.refers_back
            if flight.refers_back and not usable:
                flight.failure = _FAILED_BEFORE
                return
            if self._session.logits_ring is not None and (
                len(device.host_logits) or not device.num_samples
            ):
                flight.published_rows = inputs.num_logits
            flight.launched = self._backend.launch(inputs, device, self._logits(ready.slot))
        except (StepInputsError, RingError) as error:
            _log.error("step %d cannot be computed: %s", ready.step_id, error)
            flight.failure = words_of(error)
        except Exception as error:  # the top of a step: the scheduler decides what becomes of it
            flight.failure = self._failed(ready.step_id, error)

    def _answer_all(self) -> None:
        try:
            self._answer_each()
        except BaseException as error:  # the top of the thread: the launching one raises it
            self._lost = self._lost or error
            self._over.set()
        if self._over.is_set():  # what is unanswered stays so: this process ends
            self._wake()
            self._room.release()

    def _answer_each(self) -> None:
        ended, failed_before = 0.0, False
        while (flight := self._flights.get()) is not None:
            drawn = self._wait(flight)
            if self._over.is_set():
                return
            now = time.monotonic()
            if flight.failure is None and flight.refers_back and failed_before:
                flight.failure = _FAILED_BEFORE
            failed_before = flight.failure is not None
            self._session.send(self._answer(flight, drawn, now - max(flight.began, ended)))
            ended = now
            self._counters.watch.step_ended(time.monotonic())
            self._room.release()

    def _wait(self, flight: _Flight) -> DrawnColumns | None:
        launched, flight.launched = flight.launched, None
        if launched is None:
            return None
        try:
            return launched.wait()
        except Exception as error:  # as in _launch
            flight.failure = self._failed(flight.ready.step_id, error)
            return None

    def _answer(
        self, flight: _Flight, drawn: DrawnColumns | None, seconds: float
    ) -> stage_pb2.ExecutorMessage:
        ready = flight.ready
        if flight.failure is not None:
            return failed(ready, flight.failure)
        ring = self._session.logits_ring
        if ring is not None and flight.published_rows is not None:
            ring.publish(ready.slot, ready.step_id, flight.published_rows)
        self._counters.step_done(flight.tokens, seconds)
        return done(ready, int(seconds * 1e9), drawn=drawn)

    def _failed(self, step_id: int, error: Exception) -> str:
        """What to answer for a step that failed."""
        _log.error("step %d failed", step_id, exc_info=error)
        words = words_of(error)
        if self._fatal is not None:
            self._fatal(f"step {step_id} failed: {words}")
        if isinstance(error, DeviceLostError):
            self._lost = error
            self._over.set()
        return words
