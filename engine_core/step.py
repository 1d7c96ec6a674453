"""A step as values: what the scheduler plans, what the executor answers, what it means to requests.

Being data, a step crosses a process boundary, can be logged, replayed and property-tested.
What exists once per row and step is a NamedTuple: made in half the time of a frozen dataclass, and
the native twins read it as the plain tuple that it is.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from triptych.engine_core.ids import RequestId, SequenceId


class FinishReason(IntEnum):
    """Why a sequence ended; the numbers of triptych.v1.FinishReason."""

    STOP = 1
    LENGTH = 2
    ABORT = 3


class ScheduledSequence(NamedTuple):
    """One row of a step: compute tokens [start, start + num_tokens) of the sequence.

    `samples`: the row computes the sequence's last token, so its logits give the next one.
    """

    sequence_id: SequenceId
    start: int
    num_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes, in row order. An empty plan means that there is nothing to do."""

    step_id: int
    rows: tuple[ScheduledSequence, ...]
    num_tokens: int
    num_samples: int
    preempted: tuple[SequenceId, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.rows)


class SampleRow(NamedTuple):
    """What the sampler needs for logits row i (the i-th row with `samples`), besides the logits.

    `position` is the index of the output token to be drawn, `choice` the index among the parallel
    choices: with `seed` they key the noise. `banned` ids get no probability.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    choice: int
    position: int
    banned: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The drawn token of each row with `samples`, in row order; -1 where logits are not finite."""

    step_id: int
    token_ids: tuple[int, ...]


class Token(NamedTuple):
    """One more output token of a request; `finish` on the last one."""

    request_id: RequestId
    token_id: int
    finish: FinishReason | None


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended with an error (a variant of errors.RequestError)."""

    request_id: RequestId
    error: Exception


Event = Token | Failed
