"""Beam search, as the pure bookkeeping of hypotheses: no sequences, blocks or logits.

The rules are those of transformers' `generate(num_beams=...)` without sampling: which
continuations go on, which hypotheses are kept, and when the search ends. Differential tests hold
the two together.
"""

import math
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import islice

from triptych.engine_core.sampling_params import BeamParams

_MOST_LOG = 700.0  # exp of it, and its reciprocal, are normal float64

Candidates = tuple[Collection[int], Collection[float]]
"""Token ids with the natural logarithms of their probabilities, most likely first."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Output tokens; `score` is the sum of their logprobs, of a finished one by length."""

    tokens: tuple[int, ...]
    score: float


@dataclass(frozen=True, slots=True)
class Extension:
    """Beam `parent` (its index before) goes on with `token_id`."""

    parent: int
    token_id: int


class BeamSearch:
    """One search. `running` are the beams, best first; a search begins with one, empty.

    No hypothesis ends with a stop id before `min_tokens` tokens.
    """

    def __init__(
        self,
        params: BeamParams,
        max_tokens: int,
        stop_token_ids: Sequence[int],
        min_tokens: int = 0,
    ) -> None:
        self._params = params
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens
        self._stops = frozenset(stop_token_ids)
        self._finished: list[Hypothesis] = []  # at most `width`, best first
        self._improvable = True
        self.running = [Hypothesis((), 0.0)]
        self.done = False

    @property
    def candidates_wanted(self) -> int:
        """How many of the most likely next tokens `advance` must be given for each beam."""
        return max(2, 1 + len(self._stops)) * self._params.width

    def advance(self, candidates: Sequence[Candidates]) -> list[Extension]:
        """Take the next tokens of each running beam; the beams that replace them, best first.

        Empty, and `done`, when the search is over.
        """
        width = self._params.width
        length = len(self.running[0].tokens) + 1
        last = length >= self._max_tokens
        going_on: list[tuple[Extension, Hypothesis]] = []
        ending: list[Hypothesis] = []
        for rank, (score, parent, token_id) in enumerate(self._best_first(candidates)):
            if rank >= width and (last or len(going_on) == width):
                break  # nothing that follows counts: with many stops they are thousands
            tokens = (*self.running[parent].tokens, token_id)
            if not last and token_id not in self._stops:
                going_on.append((Extension(parent, token_id), Hypothesis(tokens, score)))
            elif rank < width:  # worse ones only stand by, so that enough beams can go on
                ending.append(Hypothesis(tokens, self._by_length(score, length)))
        self._keep(ending)
        del going_on[width:]
        self.running = [beam for _, beam in going_on]
        self.done = not going_on or self._over(length)
        return [] if self.done else [extension for extension, _ in going_on]

    def _best_first(self, candidates: Sequence[Candidates]) -> Iterator[tuple[float, int, int]]:
        """(score, parent, token id): by score, of equal ones by parent, then by rank."""

        early = len(self.running[0].tokens) < self._min_tokens
        barred = self._stops if early else frozenset[int]()

        def extended(parent: int) -> Iterator[tuple[float, int, int, int]]:
            score = self.running[parent].score
            for rank, (token_id, logprob) in enumerate(zip(*candidates[parent], strict=True)):
                if token_id not in barred:
                    yield -(score + float(logprob)), parent, rank, int(token_id)

        merged = merge(*map(extended, range(len(candidates))))
        for negative, parent, _, token_id in islice(merged, self.candidates_wanted):
            yield -negative, parent, token_id

    def best(self, count: int) -> list[Hypothesis]:
        """The best finished hypotheses, best first; all, if there are fewer."""
        return self._finished[:count]

    def _keep(self, ending: list[Hypothesis]) -> None:
        full = len(self._finished) == self._params.width
        if (full and self._params.early_stopping == "true") or not self._improvable:
            return
        # Stable: of equal ones the first to finish is kept.
        merged = sorted([*self._finished, *ending], key=lambda each: -each.score)
        self._finished = merged[: self._params.width]

    def _over(self, length: int) -> bool:
        params, full = self._params, len(self._finished) == self._params.width
        if full:
            far = params.early_stopping == "never" and params.length_penalty > 0.0
            reach = self._max_tokens if far else length
            possible = self._by_length(self.running[0].score, reach)
            self._improvable = self._improvable and possible > self._finished[-1].score
        return not self._improvable or (full and params.early_stopping == "true")

    def _by_length(self, score: float, length: int) -> float:
        """score / length ** length_penalty, the power at most a float64's; never an infinity."""
        penalty = self._params.length_penalty
        if abs(penalty) * math.log(length) > _MOST_LOG:
            power = math.exp(math.copysign(_MOST_LOG, penalty))
        else:
            power = length**penalty
        return max(score / power, -sys.float_info.max)
