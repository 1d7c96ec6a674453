"""A step as values: what the scheduler plans, what the executor answers, what it means to requests.

Being data, a step crosses a process boundary, can be logged, replayed and property-tested.
"""

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, Protocol

from triptych.engine_core.errors import RequestError
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
    """What one step computes. An empty plan means that there is nothing to do."""

    step_id: int
    num_rows: int
    num_tokens: int
    num_samples: int
    num_logits: int
    preempted: tuple[SequenceId, ...] = ()

    def __bool__(self) -> bool:
        return self.num_rows > 0


class Logprobs(Protocol):
    """Logprobs at one position, as a sampler makes them (kernels.sampler_params.TokenLogprobs).

    The core only passes them on; beam search reads the candidates.
    """

    @property
    def logprob(self) -> float:
        """Of the token itself."""
        ...

    @property
    def rank(self) -> int:
        """1 for the most likely token."""
        ...

    @property
    def top_ids(self) -> Collection[int]:
        """The most likely tokens, most likely first."""
        ...

    @property
    def top_logprobs(self) -> Collection[float]:
        """Theirs."""
        ...


@dataclass(frozen=True, slots=True)
class StepResult:
    """What was drawn for each of the step's samples, in order; -1 where logits are not finite, and
    where an earlier token of the sequence is not its draft.

    `logprobs`: by sample index, of those that ask for them. `scores`: for each of the step's
    `scores()`, the logprobs of its positions; None for a position whose logits are not finite.
    `errors`: by sample index, why no token was drawn, where that is not for the model's logits.
    `complete`, ascending: samples whose token ends its sequence, because a grammar allows no other
    behind it.
    """

    step_id: int
    token_ids: Sequence[int]
    logprobs: Mapping[int, Logprobs] = field(default_factory=dict)
    scores: Sequence[Sequence[Logprobs | None]] = ()
    errors: Mapping[int, RequestError] = field(default_factory=dict)
    complete: Sequence[int] = ()


class PromptLogprobs(NamedTuple):
    """Logprobs of prompt tokens [position, position + len(logprobs)) of a request; in order, and
    all before its first output token. The first prompt token (position 0) has none."""

    request_id: RequestId
    position: int
    logprobs: Sequence[Logprobs]


class Started(NamedTuple):
    """A choice has its first output token; `cached_tokens` of its prompt were not computed."""

    request_id: RequestId
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The choice ended with an error."""

    request_id: RequestId
    error: RequestError


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step meant to requests, in columns of equal length: one entry an output token.

    `request_ids` int64, `token_ids` int32, `finishes` uint8: a FinishReason or 0. One request may
    have several entries (a beam hypothesis comes as a whole, at the end). `logprobs`: by entry.
    `scores`: a beam hypothesis's score by its last entry.
    """

    step_id: int
    request_ids: "array[int]" = field(default_factory=lambda: array("q"))
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    finishes: "array[int]" = field(default_factory=lambda: array("B"))
    logprobs: Mapping[int, Logprobs] = field(default_factory=dict)
    scores: Mapping[int, float] = field(default_factory=dict)
    started: Sequence[Started] = ()
    prompt_logprobs: Sequence[PromptLogprobs] = ()
    failed: Sequence[Failed] = ()

    @property
    def says_something(self) -> bool:
        """Whether anybody is to be told. A step that computes prompts only, or logits for others
        to draw from, means nothing to its requests yet."""
        return bool(self.request_ids or self.started or self.prompt_logprobs or self.failed)
