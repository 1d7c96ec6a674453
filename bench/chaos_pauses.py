"""How long streams stood still for a kill. No engine, no clock: seconds of one clock come in.

A stream's pause is counted from the kill to its next token. Tokens that had been drawn before the
kill may still be on their way: of the silences that hold the kill, or begin within `ON_THE_WAY`
after it, the longest one counts, from the kill to its end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

ON_THE_WAY = 0.25


@dataclass(frozen=True, slots=True)
class Kill:
    """One signal to one process. `what`: "kill", "freeze" (and thawed) or "hang" (never thawed)."""

    when: float
    stage: str
    pid: int
    what: str
    recovering: bool = False
    """Whether not every stream had gone on after the kill before."""

    def line(self, start: float) -> str:
        """For the time line; seconds from `start`."""
        also = ", while another recovered" if self.recovering else ""
        return f"{self.when - start:9.3f} s  {self.what} {self.stage} (pid {self.pid}{also})"


def pause_of(kill: float, arrivals: Sequence[tuple[float, int]]) -> float | None:
    """Seconds from the kill to the stream's next token; None unless it had tokens on both sides."""
    times = [when for when, _ in arrivals]
    if not times or times[0] > kill or times[-1] <= kill:
        return None
    silences = [
        (later - earlier, later)
        for earlier, later in pairwise(times)
        if later > kill and earlier <= kill + ON_THE_WAY
    ]
    return max(silences)[1] - kill


def pauses(
    kills: Sequence[Kill], arrivals: Sequence[Sequence[tuple[float, int]]], stage: str
) -> list[list[float]]:
    """For each lone kill of the stage, the pauses of the streams that were open; none is empty.

    Lone: the next one came only after the longest of its pauses. Streams that had not gone on after
    the one before do not count: theirs would be several recoveries at once.
    """
    found = []
    for i, kill in enumerate(kills):
        if kill.stage != stage or kill.what != "kill":
            continue
        before = kills[i - 1].when + ON_THE_WAY if i else 0.0
        seen = [
            pause
            for each in arrivals
            if any(before < when <= kill.when for when, _ in each)
            and (pause := pause_of(kill.when, each)) is not None
        ]
        later = kills[i + 1].when if i + 1 < len(kills) else float("inf")
        if seen and kill.when + max(seen) < later:
            found.append(seen)
    return found


def serving_in_silence(
    samples: Sequence[tuple[float, bool]],
    arrivals: Sequence[float],
    waited: Sequence[tuple[float, float]],
) -> float:
    """The longest time that health said SERVING while somebody waited and nobody got a token.

    `samples`: (when, whether it said so), in order; `arrivals`: when any token came, in order;
    `waited`: from when to when each stream was open. Between two samples health is what the first
    one said.
    """
    longest = since = 0.0
    counting = False
    at = 0
    for (when, said), (after, _) in pairwise(samples):
        came = False
        while at < len(arrivals) and arrivals[at] <= after:
            came = came or arrivals[at] > when
            at += 1
        somebody = any(start <= when and after <= end for start, end in waited)
        if said and somebody and not came:
            since = since if counting else when
            counting = True
            longest = max(longest, after - since)
        else:
            counting = False
    return longest
