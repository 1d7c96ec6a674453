"""What `make chaos` says of each stream: the same answer, a named end, or a fault.

No engine, no clock. A stream is compared with what the same request was answered when nobody was
killed: whole where it came whole, as far as it came where it ended with an error.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

CANCELLED, DEADLINE, SLOW = "CANCELLED", "DEADLINE_EXCEEDED", "SLOW_READER"
UNAVAILABLE = "UNAVAILABLE"
CONNECTION = "CONNECTION"
"""The connection ended, or could not be made: what a dead process says."""
STALLED = "STALLED"
"""No end within the client's patience."""


class Behaviour(StrEnum):
    """What a client does beside reading."""

    PLAIN = "plain"
    CANCELS = "cancels"
    SLOW = "slow"
    DEADLINE = "deadline"


_MAY_END = {
    Behaviour.PLAIN: frozenset[str](),
    Behaviour.CANCELS: frozenset({CANCELLED}),
    Behaviour.SLOW: frozenset({SLOW}),
    Behaviour.DEADLINE: frozenset({DEADLINE}),
}


class Verdict(StrEnum):
    """Of one stream. The last three are faults."""

    SAME = "same"
    """It came whole and as expected, or was refused as expected."""
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    SLOW = "slow"
    BROKEN = "broken"
    """Its tokenizer process died while it was open, and it ended with an error that says so."""
    AWAY = "away"
    """It was begun while its tokenizer process was away, and refused."""
    LOST = "lost"
    DOUBLED = "doubled"
    CHANGED = "changed"


FAULTS = (Verdict.LOST, Verdict.DOUBLED, Verdict.CHANGED)
_ENDS = {CANCELLED: Verdict.CANCELLED, DEADLINE: Verdict.DEADLINE, SLOW: Verdict.SLOW}


@dataclass(slots=True)
class Choice:
    """One choice of an answer, as far as it came. `logprobs`: a text for each token.

    `ends` counts finish reasons; `finish` has all that is said with one.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[str] = field(default_factory=list)
    finish: str = ""
    ends: int = 0


@dataclass(slots=True)
class Heard:
    """What a client heard of one request.

    `error`: the name of the status that it ended with, "" without one, and `message` what that
    says. `ended`: the end came, with or without an error. `arrivals`: when each message with tokens
    came and how many there were by then; seconds of one clock, as `sent` and `over`.
    """

    choices: dict[int, Choice] = field(default_factory=dict)
    prompt_logprobs: list[str] = field(default_factory=list)
    usage: str = ""
    error: str = ""
    message: str = ""
    ended: bool = False
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    sent: float = 0.0
    over: float = 0.0

    def choice(self, index: int) -> Choice:
        """That choice; made where it is new."""
        return self.choices.setdefault(index, Choice())

    @property
    def tokens(self) -> int:
        """How many came, all choices together; pieces of logprobs where the door tells no ids."""
        return sum(max(len(one.token_ids), len(one.logprobs)) for one in self.choices.values())


@dataclass(frozen=True, slots=True)
class Outage:
    """A tokenizer process is away: from its death to its next one's first answer."""

    start: float
    end: float

    def touches(self, start: float, end: float) -> bool:
        """Whether some of it lies between the two."""
        return self.start <= end and start <= self.end


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict and what it rests on."""

    verdict: Verdict
    why: str = ""

    @property
    def fault(self) -> bool:
        return self.verdict in FAULTS


def judge(expected: Heard, heard: Heard, behaviour: Behaviour, outages: list[Outage]) -> Judgement:
    """The verdict on one stream."""
    if heard.error == STALLED or not heard.ended:
        return Judgement(Verdict.LOST, f"no end came within {heard.over - heard.sent:.0f} s")
    whole = not heard.error
    if whole and expected.error:
        return Judgement(Verdict.CHANGED, f"answered, where {expected.error} was the answer before")
    if difference := _difference(expected, heard, whole=whole):
        return difference
    if whole or heard.error == expected.error:
        return Judgement(Verdict.SAME)
    return _judge_error(heard, behaviour, outages)


def _judge_error(heard: Heard, behaviour: Behaviour, outages: list[Outage]) -> Judgement:
    if heard.error in _MAY_END[behaviour]:
        return Judgement(_ENDS[heard.error])
    if heard.error in (UNAVAILABLE, CONNECTION):
        met = [each for each in outages if each.touches(heard.sent, heard.over)]
        if any(each.start >= heard.sent for each in met):
            return Judgement(Verdict.BROKEN)
        if met:
            return Judgement(Verdict.AWAY if not heard.arrivals else Verdict.BROKEN)
    return Judgement(Verdict.LOST, f"ended with {heard.error}: {heard.message}")


def _difference(expected: Heard, heard: Heard, *, whole: bool) -> Judgement | None:
    for index, choice in sorted(heard.choices.items()):
        if index not in expected.choices:
            return Judgement(Verdict.CHANGED, f"choice {index} is none of the request's")
        if found := _choice_difference(expected.choices[index], choice, whole=whole):
            return Judgement(found.verdict, f"choice {index}: {found.why}")
    if not whole:
        return None
    if missing := sorted(expected.choices.keys() - heard.choices.keys()):
        return Judgement(Verdict.LOST, f"choices {missing} never came")
    for name in ("prompt_logprobs", "usage"):
        if getattr(expected, name) != getattr(heard, name):
            was, now = getattr(expected, name), getattr(heard, name)
            return Judgement(Verdict.CHANGED, f"{name} {now!s:.200}, was {was!s:.200}")
    return None


def _choice_difference(expected: Choice, heard: Choice, *, whole: bool) -> Judgement | None:
    if heard.ends > 1:
        return Judgement(Verdict.DOUBLED, f"ended {heard.ends} times")
    whole = whole or bool(heard.ends)
    pairs = (
        ("token ids", expected.token_ids, heard.token_ids),
        ("logprobs", expected.logprobs, heard.logprobs),
        ("text", list(expected.text), list(heard.text)),
    )
    for name, was, now in pairs:
        if now != (was if whole else was[: len(now)]):
            at = next((i for i, (a, b) in enumerate(zip(was, now, strict=False)) if a != b),
                      min(len(was), len(now)))  # fmt: skip
            why = f"{name} differ from {at} on, of {len(was)} expected and {len(now)} heard"
            return Judgement(_kind(was, now, at), why)
    if whole and heard.ends == 0:
        return Judgement(Verdict.LOST, "no finish reason came")
    if whole and heard.finish != expected.finish:
        return Judgement(Verdict.CHANGED, f"finish {heard.finish}, was {expected.finish}")
    return None


def _kind(was: list[int] | list[str], now: list[int] | list[str], at: int) -> Verdict:
    """Of a difference that begins at `at`: a run came twice, a run is missing, or another.

    What is left of a cut answer has to go on in the same way; 8 tokens decide.
    """
    for back in range(1, at + 1):
        again = now[at : at + back + 8]
        if len(again) >= min(back, 4) and again == was[at - back : at - back + len(again)]:
            return Verdict.DOUBLED
    if was[: len(now)] == now:
        return Verdict.LOST  # whole, and yet short
    rest = now[at : at + 8]
    if len(rest) >= 4 and any(
        was[skip : skip + len(rest)] == rest for skip in range(at + 1, len(was))
    ):
        return Verdict.LOST
    return Verdict.CHANGED


@dataclass(slots=True)
class Ledger:
    """Verdicts of a run, and the tokens that were compared."""

    verdicts: Counter[Verdict] = field(default_factory=Counter)
    tokens: int = 0

    def add(self, heard: Heard, judgement: Judgement) -> None:
        """Enter one stream."""
        self.verdicts[judgement.verdict] += 1
        self.tokens += heard.tokens

    @property
    def streams(self) -> int:
        """All that were begun while there was a tokenizer process to begin them with."""
        return sum(self.verdicts.values()) - self.verdicts[Verdict.AWAY]

    def line(self) -> str:
        """Every verdict that was given, with its count."""
        return ", ".join(f"{self.verdicts[each]} {each}" for each in Verdict if self.verdicts[each])
