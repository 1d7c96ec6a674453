"""Whether a request can be taken although no step can be made now, and why not.

Before the engine has been ready for the first time nothing is taken: nobody knows when it will be.
Later a stage that is missing is expected back, and requests wait for it, for a bounded time in all;
unless the supervisor knows that waiting is in vain (its word is read from a file, at ticks only,
and only while something is missing).
"""

from collections.abc import Callable


class Outage:
    """Told when steps can be made and when not; `now` is by one clock, in seconds."""

    def __init__(self, timeout: float = 60.0, trouble: Callable[[], str | None] = lambda: None):
        """`timeout`: how long requests wait in one outage. `trouble`: why waiting is in vain."""
        self._timeout = timeout
        self._trouble = trouble
        self._missing = "the engine is starting"
        self._since: float | None = None
        self._known: str | None = None
        self._ready = False
        self._ever_ready = False

    def ready(self) -> None:
        """Steps can be made."""
        self._ready = self._ever_ready = True
        self._since = self._known = None

    def missing(self, what: str, now: float) -> None:
        """A stage is not there; `what` says which, as a sentence. The outage began with the first
        such call since `ready`."""
        self._ready = False
        if self._ever_ready:
            self._missing = what
            self._since = now if self._since is None else self._since

    def look(self) -> None:
        """Ask the supervisor's word. Reads a file while something is missing."""
        if not self._ready:
            self._known = self._trouble()

    @property
    def reason(self) -> str:
        """What is missing; empty when nothing is."""
        if self._ready:
            return ""
        return self._known or self._missing

    def refusal(self, now: float) -> str | None:
        """Why nobody should wait; None: requests are taken, and wait if they must."""
        if self._ready:
            return None
        if self._known is not None or self._since is None:
            return self.reason
        if now - self._since >= self._timeout:
            return f"{self._missing}, for longer than recovery_timeout {self._timeout:g} s"
        return None
