"""Whether a process that makes steps is idle, busy or stuck, and for how long.

It reads no clock: times come in, monotonic, in seconds.
"""

import threading
from dataclasses import dataclass

from triptych.v1 import stage_pb2


@dataclass(frozen=True, slots=True)
class Seen:
    """What a process does at a moment. Ages are in seconds, 0 when idle."""

    activity: stage_pb2.Activity.ValueType
    step_age: float
    """Of the oldest step that is being made; 0 when none is."""
    progress_age: float
    """Since a step ended, or work came to a process that had none."""

    @property
    def stuck(self) -> bool:
        """Whether there is work and no step has ended for too long."""
        return self.activity == stage_pb2.ACTIVITY_STUCK

    @property
    def step_age_ms(self) -> int:
        """As messages carry it."""
        return int(self.step_age * 1000)

    @property
    def progress_age_ms(self) -> int:
        """As messages carry it."""
        return int(self.progress_age * 1000)


@dataclass(frozen=True, slots=True)
class _State:
    begun: tuple[float, ...] = ()  # when the steps in flight began, oldest first
    waits: bool = False
    progress: float = 0.0  # when a step ended last, or work came

    @property
    def idle(self) -> bool:
        return not self.begun and not self.waits


class Watch:
    """Any thread may tell it of steps and of work, and ask. Steps are made one after another."""

    def __init__(self, timeout: float) -> None:
        """With work for `timeout` seconds in which no step ends, the process is stuck."""
        self._timeout = timeout
        self._state = _State()  # replaced as a whole, so that readers need no lock
        self._lock = threading.Lock()  # of those that tell

    def work(self, waits: bool, now: float) -> None:
        """Say whether anything waits or runs, beside the steps in flight. Of a process whose
        steps are all the work that it knows this is never told."""
        if waits == self._state.waits:  # at nearly every turn
            return
        with self._lock:
            state = self._state
            progress = now if state.idle and waits else state.progress
            self._state = _State(state.begun, waits, progress)

    def step_began(self, now: float) -> None:
        """A step is being made from now on, or as soon as those before it are."""
        with self._lock:
            state = self._state
            progress = now if state.idle else state.progress
            self._state = _State((*state.begun, now), state.waits, progress)

    def step_ended(self, now: float) -> None:
        """The oldest step is made: that is progress, and the one behind it begins now."""
        with self._lock:
            state = self._state
            begun = (now, *state.begun[2:]) if len(state.begun) > 1 else ()
            self._state = _State(begun, state.waits, now)

    def steps_lost(self) -> None:
        """The steps in flight will not end: no progress."""
        with self._lock:
            state = self._state
            self._state = _State((), state.waits, state.progress)

    @property
    def progress(self) -> float:
        """When a step ended last, or work came to a process that had none; 0 before all that."""
        return self._state.progress

    @property
    def oldest_step(self) -> float | None:
        """When the oldest of the steps in flight could begin; None while there is none."""
        begun = self._state.begun
        return begun[0] if begun else None

    def at(self, now: float) -> Seen:
        """What the process does at `now`."""
        state = self._state
        if state.idle:
            return Seen(stage_pb2.ACTIVITY_IDLE, 0.0, 0.0)
        step_age = max(0.0, now - state.begun[0]) if state.begun else 0.0
        progress_age = max(0.0, now - state.progress)
        stuck = progress_age > self._timeout
        activity = stage_pb2.ACTIVITY_STUCK if stuck else stage_pb2.ACTIVITY_BUSY
        return Seen(activity, step_age, progress_age)
