"""Which of the drawn tokens count: drafts are taken as far as the very same tokens are drawn.

The rule of speculative decoding with the target's own draws (greedy or with noise that is fixed for
each output position): a draft decides nothing, so what comes out is what comes out without drafts.
Leviathan, Kalman & Matias 2023 (arXiv:2211.17192) keep the distribution; this keeps every token.
"""

from array import array
from collections.abc import Collection
from typing import NamedTuple

from triptych.engine_core.batch import (
    FINISH_NONE,
    FINISH_NOT_FINITE,
    FINISH_STOP,
    NOT_FINITE,
    UNKNOWN_DRAFT,
)
from triptych.engine_core.planned_step import PlannedStep, Rider
from triptych.engine_core.running import RunningSequence


class TakenTokens(NamedTuple):
    """What is taken of one sequence's samples, from `first_sample` on; at least one.

    `wanted` is False where they are nobody's: closed in flight, or held. `num_drafted`: how many of
    `token_ids`, from the first on, are drafts, and so are computed. `finish`: the last one's.
    """

    sequence: RunningSequence
    wanted: bool
    first_sample: int
    token_ids: list[int]
    num_drafted: int
    finish: int

    @property
    def is_broken(self) -> bool:
        """Whether logits that count are not finite."""
        return self.token_ids[-1] == NOT_FINITE


def taken_tokens(
    step: PlannedStep, drawn: "array[int]", complete: "array[int]"
) -> list[TakenTokens]:
    """Of a whole step, in the order of its samples; nothing changes. AssertionError where the
    arguments are not of such a step."""
    drafts, count = step.drafts(), len(drawn)
    assert count == len(drafts), f"apply: {count} tokens for {len(drafts)} samples"
    assert min(drawn, default=0) >= NOT_FINITE, "apply: a token id is below -1"
    assert UNKNOWN_DRAFT not in drafts, "apply: a draft is not filled"
    marks = [-1, *complete, count]
    assert marks == sorted(set(marks)), "apply: `complete` are not samples in ascending order"
    found, ends, first = [], frozenset(complete), 0
    for sampler in step.samplers():
        found.append(_taken(sampler, first, drawn, ends))
        first += sampler.row.num_samples
    return found


def _taken(
    sampler: Rider, first: int, drawn: "array[int]", complete: Collection[int]
) -> TakenTokens:
    sequence, row = sampler
    if sequence.closed or sequence.rules.held:
        return TakenTokens(sequence, False, first, [drawn[first]], 0, FINISH_NONE)
    taken: list[int] = []
    finish, num_drafted = FINISH_NONE, 0
    for index, draft in enumerate([*row.drafts, UNKNOWN_DRAFT - 1], first):
        token_id = drawn[index]
        taken.append(token_id)
        if token_id == NOT_FINITE:
            finish = FINISH_NOT_FINITE
        elif index in complete:
            finish = FINISH_STOP
        else:
            finish = sequence.finish(token_id, sequence.num_tokens + len(taken))
        num_drafted += token_id == draft
        if finish != FINISH_NONE or token_id != draft:
            break
    return TakenTokens(sequence, True, first, taken, num_drafted, finish)
