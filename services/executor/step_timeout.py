"""Finds a step that takes too long, or waits for too long, by a clock that stands still while this
process does."""

from triptych.services.runtime.silence import ListeningClock

_LONGEST_LOOK = 1.0  # seconds that may count between two looks


class StepTimeout:
    """Looked at several times a second; it reads no clock."""

    def __init__(self, timeout: float, now: float) -> None:
        """`now` is monotonic, in seconds, here as below."""
        self._timeout = timeout
        self._clock = ListeningClock(_LONGEST_LOOK, now)
        self._step: float | None = None
        self._since = 0.0

    def passed(self, step: float | None, now: float) -> float | None:
        """How long the step in flight has taken, where that is too long. `step` tells steps apart:
        when it began; None while there is none."""
        time = self._clock.at(now)
        if step != self._step:
            self._step, self._since = step, time
        age = time - self._since
        return age if step is not None and age > self._timeout else None
