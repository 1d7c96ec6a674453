"""How long a peer has been silent, by a clock that stands still while this process does."""


class ListeningClock:
    """Time in which this process could have heard its peers.

    A process that was stopped, starved or suspended finds old time stamps and, for a moment, no
    message: they wait in sockets that it has not read yet. So a gap between two looks at the clock
    counts as at most `longest` seconds, the time after which its owner looks again when it can.
    """

    def __init__(self, longest: float, now: float) -> None:
        """`now` as for `at`."""
        self._longest = longest
        self._looked = now
        self._time = 0.0

    def at(self, now: float) -> float:
        """Seconds listened so far; `now` is monotonic, in seconds."""
        self._time += min(max(0.0, now - self._looked), self._longest)
        self._looked = now
        return self._time
