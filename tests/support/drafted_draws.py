"""Runs sequences through a StepSampler without a core: logits by script, drafts by whim.

    outcomes = run(sampler, [Wish(1, params, prompt)], logits_of, drafts_of)

`logits_of(sequence_id, tokens)` is the row behind these tokens; `drafts_of(sequence_id, output)`
the guesses for the next step. What the core does with a step's tokens is done here, plainly.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from triptych.engine_core.errors import RequestError
from triptych.engine_core.sampling_params import SamplingParams
from triptych.services.scheduler.running_grammars import LAST
from triptych.services.scheduler.sampler import StepSampler
from triptych.services.scheduler.verification import DrawnStep

LogitsOf = Callable[[int, Sequence[int]], NDArray[np.float32]]
DraftsOf = Callable[[int, Sequence[int]], Sequence[int]]


class Wish(NamedTuple):
    """A sequence. `output_ids`: what is out already."""

    sequence_id: int
    params: SamplingParams
    prompt_ids: tuple[int, ...] = (1, 2)
    output_ids: tuple[int, ...] = ()
    choice: int = 0


@dataclass
class Result:
    """What became of one; `steps` and `accepted` may differ between runs that mean the same."""

    token_ids: list[int]
    logprobs: list[object] = field(default_factory=list)
    finish: str = ""
    steps: int = field(default=0, compare=False)
    accepted: int = field(default=0, compare=False)
    error: RequestError | None = field(default=None, compare=False)


def no_drafts(sequence_id: int, output_ids: Sequence[int]) -> Sequence[int]:
    del sequence_id, output_ids
    return ()


def random_script(seed: int, vocabulary: int, spread: float = 3.0) -> LogitsOf:
    """A row by sequence, position and last token; the last one comes again now and then."""

    def logits_of(sequence_id: int, tokens: Sequence[int]) -> NDArray[np.float32]:
        key = [seed, sequence_id, len(tokens), tokens[-1]]
        row = np.random.default_rng(key).standard_normal(vocabulary) * spread
        return row.astype(np.float32)

    return logits_of


class DraftedDraws:
    """Several sequences, a step for all at a time."""

    def __init__(self, sampler: StepSampler, logits_of: LogitsOf) -> None:
        self._sampler = sampler
        self._logits_of = logits_of
        self.wishes: dict[int, Wish] = {}
        self.results: dict[int, Result] = {}
        self.open: list[int] = []

    def start(self, wish: Wish) -> None:
        sequence_id = wish.sequence_id
        self._sampler.open(
            sequence_id, wish.params, wish.choice, wish.prompt_ids, list(wish.output_ids)
        )
        self.wishes[sequence_id] = wish
        self.results[sequence_id] = Result(list(wish.output_ids))
        self.open.append(sequence_id)

    def step(self, drafts_of: DraftsOf, *, prepare: bool = True) -> DrawnStep:
        """One for all that are open."""
        ids: list[int] = []
        drafts: list[int] = []
        rows: list[NDArray[np.float32]] = []
        for sequence_id in self.open:
            wish, output = self.wishes[sequence_id], self.results[sequence_id].token_ids
            room = wish.params.max_tokens - len(output) - 1
            guesses = list(drafts_of(sequence_id, output))[:room] if output else []
            tokens = [*wish.prompt_ids, *output]
            for count in range(len(guesses) + 1):
                rows.append(self._logits_of(sequence_id, [*tokens, *guesses[:count]]))
            ids += [sequence_id] * (len(guesses) + 1)
            drafts += [*guesses, LAST]
        if prepare:
            self._sampler.prepare(ids, drafts)
        drawn = self._sampler.draw(np.stack(rows), ids, range(len(rows)), drafts)
        self._apply(ids, drafts, drawn)
        return drawn

    def _apply(self, ids: list[int], drafts: list[int], drawn: DrawnStep) -> None:
        appended: list[tuple[int, int]] = []
        sample, ended = 0, []
        while sample < len(ids):
            sequence_id, begin = ids[sample], sample
            last = drafts.index(LAST, sample)
            self.results[sequence_id].steps += 1
            for at in range(begin, last + 1):
                if not self._take(sequence_id, at, drawn, appended):
                    ended.append(sequence_id)
                    break
                if drawn.token_ids[at] != drafts[at]:
                    break
                self.results[sequence_id].accepted += 1
            sample = last + 1
        self._sampler.append([each for each, _ in appended], [token for _, token in appended])
        for sequence_id in ended:
            self.stop(sequence_id)

    def _take(
        self, sequence_id: int, at: int, drawn: DrawnStep, appended: list[tuple[int, int]]
    ) -> bool:
        """Whether the sequence goes on."""
        result, params = self.results[sequence_id], self.wishes[sequence_id].params
        token = drawn.token_ids[at]
        if token < 0:
            result.error = drawn.errors.get(at)
            result.finish = "not finite" if result.error is None else str(result.error)
            return False
        result.token_ids.append(token)
        appended.append((sequence_id, token))
        logprobs = drawn.logprobs.get(at)
        if logprobs is not None:
            bits = struct.pack("<d", logprobs.logprob), logprobs.rank
            result.logprobs.append(
                (*bits, logprobs.top_ids.tolist(), logprobs.top_logprobs.tobytes())
            )
        if at in drawn.complete or token in params.stop_token_ids:
            result.finish = "stop"
        elif len(result.token_ids) >= params.max_tokens:
            result.finish = "length"
        return not result.finish

    def stop(self, sequence_id: int) -> None:
        self.open.remove(sequence_id)
        self._sampler.close(sequence_id)


def run(
    sampler: StepSampler,
    wishes: Sequence[Wish],
    logits_of: LogitsOf,
    drafts_of: DraftsOf = no_drafts,
    *,
    prepare: bool = True,
) -> dict[int, Result]:
    """To the end of all."""
    draws = DraftedDraws(sampler, logits_of)
    for wish in wishes:
        draws.start(wish)
    while draws.open:
        draws.step(drafts_of, prepare=prepare)
    return draws.results
