"""When a process that ended is started again, and when it counts as being in a crash loop.

It reads no clock: times come in, monotonic, in seconds.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartRules:
    """What an operator decides."""

    max_restarts: int = 8
    """So many ends in a row are a crash loop."""
    window: float = 10.0
    """An end counts when the process had not been ready for so long, in seconds."""
    first_delay: float = 0.2
    """Before the second start in a row, in seconds; each further one waits twice as long."""
    longest_delay: float = 30.0
    """In seconds; also between two starts of a crash loop."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a process that ended."""

    delay: float
    """Until it is started again, in seconds."""
    in_a_row: int
    """Ends that count, this one among them."""
    crash_loop: bool


class RestartPolicy:
    """Follows the lives of one process."""

    def __init__(self, rules: RestartRules) -> None:
        self._rules = rules
        self._in_a_row = 0
        self._ready_since: float | None = None

    def ready(self, now: float) -> None:
        """It has done its part of the start."""
        self._ready_since = now

    def forget(self) -> None:
        """What happened so far is not held against it: somebody has stopped it, or mended it."""
        self._in_a_row = 0
        self._ready_since = None

    def ended(self, now: float) -> Verdict:
        """It ended by itself, or had to be killed."""
        rules, since = self._rules, self._ready_since
        self._ready_since = None
        if since is not None and now - since >= rules.window:
            self._in_a_row = 0
        self._in_a_row += 1
        if self._in_a_row >= rules.max_restarts:
            return Verdict(rules.longest_delay, self._in_a_row, crash_loop=True)
        return Verdict(self._delay(), self._in_a_row, crash_loop=False)

    def _delay(self) -> float:
        if self._in_a_row == 1:
            return 0.0
        doublings = min(self._in_a_row - 2, 64)  # far beyond any longest_delay, and still a float
        return min(self._rules.first_delay * 2.0**doublings, self._rules.longest_delay)
