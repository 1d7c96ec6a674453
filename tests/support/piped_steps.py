"""A session without a scheduler, and a device without a model: for the executor's pipeline."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from triptych.engine_core.layout import (
    DEVICE_HEADER,
    DEVICE_HEADER_OFFSET,
    STEP_HEADER,
    LogitsLayout,
    StepLayout,
)
from triptych.services.executor.backend import (
    BackendFacts,
    DrawnColumns,
    LaunchedStep,
    Logits,
)
from triptych.services.executor.device_inputs import DeviceInputs
from triptych.services.executor.step_inputs import StepInputs
from triptych.services.transport.rings import LogitsRing, StepRing
from triptych.v1 import stage_pb2

SLOTS = 4
EPOCH = 9
VOCABULARY = 11
TIMEOUT = 30.0


def no_columns(tokens: Sequence[int]) -> DrawnColumns:
    """Tokens without logprobs."""
    ints, floats = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return DrawnColumns(np.array(tokens, np.int32), floats, ints, ints, ints, floats)


class PipedSession:
    """As `pipeline.StepSource`: steps are put in, answers taken out."""

    def __init__(self, *, has_logits: bool = True) -> None:
        self.step_ring = StepRing.create(
            StepLayout(SLOTS, 16, 4, 2, 4, max_samples=4, max_history=8), EPOCH
        )
        self.logits_ring = (
            LogitsRing.create(LogitsLayout(SLOTS, 4, VOCABULARY), EPOCH) if has_logits else None
        )
        self.answers: SimpleQueue[stage_pb2.ExecutorMessage] = SimpleQueue()
        self._steps: SimpleQueue[stage_pb2.StepReady | None] = SimpleQueue()
        self._next = 0

    def put(self, tokens: Sequence[int], *, samples: int = 1, host_rows: int = 0) -> int:
        """Write a step of one row that ends in logits, and send it; its id."""
        step_id, slot = self._next, self._next % SLOTS
        self._next += 1
        memory, layout = self.step_ring.slot(slot), self.step_ring.layout
        STEP_HEADER.pack_into(memory, 0, step_id, len(tokens), 1, 1, 0)
        DEVICE_HEADER.pack_into(
            memory, DEVICE_HEADER_OFFSET, 0, 0, samples, 0, host_rows, VOCABULARY
        )

        def array(name: str) -> NDArray[np.int32]:
            offset, shape = layout.arrays[name]
            return np.frombuffer(memory, np.int32, int(np.prod(shape)), offset)

        array("token_ids")[: len(tokens)] = tokens
        array("row_starts")[:2] = 0, len(tokens)
        array("kv_lengths")[0] = len(tokens)
        array("logits_tokens")[0] = len(tokens) - 1
        array("sample_rows")[:samples] = 0
        array("history_starts")[:] = 0
        array("history_prompts")[:] = 0
        array("host_logits")[0] = 0
        self._steps.put(stage_pb2.StepReady(step_id=step_id, slot=slot, epoch=EPOCH))
        return step_id

    def end(self) -> None:
        """The scheduler is gone."""
        self._steps.put(None)

    def answer(self) -> stage_pb2.ExecutorMessage:
        """The next one."""
        return self.answers.get(timeout=TIMEOUT)

    def steps(self, wake: int) -> Iterator[stage_pb2.StepReady]:
        """As `Session.steps`."""
        while (ready := self._steps.get(timeout=TIMEOUT)) is not None:
            yield ready

    def send(self, message: stage_pb2.ExecutorMessage) -> None:
        """As `Session.send`."""
        self.answers.put(message)

    def close(self) -> bool:
        """Let go of the rings; False when somebody holds on to them."""
        closed = [ring.close() for ring in (self.step_ring, self.logits_ring) if ring is not None]
        return all(closed)


@dataclass
class PipedStep:
    """As `LaunchedStep`: done when the test says so."""

    step_id: int
    logits: Logits
    drawn: DrawnColumns | None
    error: Exception | None = None
    _done: threading.Event = field(default_factory=threading.Event)

    def finish(self, error: Exception | None = None) -> None:
        """The device is through with it."""
        self.error = error
        self.logits = np.zeros((0, 0), np.float32)  # lets go of the ring
        self._done.set()

    def wait(self) -> DrawnColumns | None:
        """As `LaunchedStep.wait`."""
        assert self._done.wait(TIMEOUT), "the test does not finish this step"
        if self.error is not None:
            raise self.error
        return self.drawn


class PipedBackend:
    """As `PipelinedBackend`: draws each step's number of tokens behind its own id."""

    def __init__(self) -> None:
        self.launched: SimpleQueue[PipedStep] = SimpleQueue()
        self.launch_error: Callable[[int], Exception | None] = lambda step_id: None
        self.finish_at_once = False
        self.registered: list[int] = []
        self.events: list[str] = []
        self.draws = True

    @property
    def facts(self) -> BackendFacts:
        """Of a model of nothing."""
        return BackendFacts(
            device="piped",
            plan="none",
            dtype="float32",
            architecture="none",
            model="none",
            parameters=0,
            weight_bytes=0,
            vocabulary_size=VOCABULARY,
            max_model_len=8,
            block_size=4,
            num_blocks=4,
            kv_cache_bytes=0,
        )

    def reserve(self, max_tokens: int) -> None:
        """Nothing to make room for."""

    def execute(self, inputs: StepInputs, logits: Logits) -> None:
        raise NotImplementedError

    def register(self, step_ring: memoryview, logits_ring: memoryview) -> None:
        self.registered = [step_ring.nbytes, logits_ring.nbytes]
        self.events.append("registered")

    def unregister(self) -> None:
        self.events.append("unregistered")

    def launch(self, inputs: StepInputs, device: DeviceInputs, logits: Logits) -> LaunchedStep:
        error = self.launch_error(inputs.step_id)
        if error is not None:
            try:
                raise error
            finally:
                del error  # else it would hold this frame, and views with it
        self.events.append(f"launched {inputs.step_id}")
        samples = device.num_samples
        drawn = no_columns([inputs.step_id] * samples) if samples and self.draws else None
        step = PipedStep(inputs.step_id, logits, drawn)
        if self.finish_at_once:
            step.finish()
        self.launched.put(step)
        return step

    def next_launch(self) -> PipedStep:
        """The next step that is launched."""
        return self.launched.get(timeout=TIMEOUT)


def settled(condition: Callable[[], bool]) -> bool:
    """Whether it comes to hold; waits for it."""
    deadline = time.monotonic() + TIMEOUT
    while not condition() and time.monotonic() < deadline:
        os.sched_yield()
    return condition()
