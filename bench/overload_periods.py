"""When requests arrive in an open loop, and what a period of them comes to. No engine, no clock."""

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Call:
    """One call: when it was sent, had its first token (0: none came) and was over; seconds of one
    clock. `due`: when it should have been sent. `refused`: the engine had no room for it."""

    due: float
    sent: float
    first: float
    over: float
    tokens: int
    refused: bool

    @property
    def seconds(self) -> float:
        return self.over - self.due


def arrivals(rate: float, seconds: float, dice: random.Random) -> list[float]:
    """Moments of a Poisson process of so many a second, from 0 to `seconds`."""
    moments = []
    at = dice.expovariate(rate)
    while at < seconds:
        moments.append(at)
        at += dice.expovariate(rate)
    return moments


@dataclass(frozen=True, slots=True)
class Period:
    """Calls of one load, which could arrive in the `seconds` from `start` on."""

    calls: list[Call]
    start: float
    seconds: float

    @property
    def accepted(self) -> list[Call]:
        return [call for call in self.calls if not call.refused]

    @property
    def refused(self) -> list[Call]:
        return [call for call in self.calls if call.refused]

    @property
    def goodput(self) -> float:
        """Output tokens a second of answers that became whole in the last four fifths of it."""
        begin, end = self.start + self.seconds / 5, self.start + self.seconds
        whole = sum(call.tokens for call in self.accepted if begin < call.over <= end)
        return whole / (end - begin)
