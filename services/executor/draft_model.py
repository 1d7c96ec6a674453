"""A small model beside the one that is served: it guesses the tokens that follow a sequence's own.

It keeps keys and values of every token that the served model has them of, in blocks of the same
ids: block tables, copies and prefix hits hold for both, and a guess that was not taken is
overwritten in both when the next token comes. A guess decides nothing (the idea is that of
https://arxiv.org/abs/2211.17192; which guesses are taken is the scheduler's business).
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from triptych.engine_core.batch import UNKNOWN_DRAFT
from triptych.services.executor.backend import Backend, BackendFacts, Logits
from triptych.services.executor.step_inputs import Ints, StepInputs, StepInputsError

_NONE: Ints = np.zeros(0, np.int32)


class DraftModel:
    """A backend whose most likely tokens are the guesses. Used by one thread."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._logits: Logits = self._room_for(0)

    @property
    def facts(self) -> BackendFacts:
        """As `Backend.facts`."""
        return self._backend.facts

    def reserve(self, max_tokens: int, max_rows: int) -> None:
        """As `Backend.reserve`, for steps of up to `max_rows` rows."""
        self._backend.reserve(max_tokens)
        self._logits = self._room_for(max_rows)

    def guess(self, inputs: StepInputs) -> tuple[StepInputs, Ints]:
        """Compute a step ahead of the served model: the inputs with their unknown tokens (id -1)
        guessed, in a copy, and the guesses, int32, in the order of those tokens.

        What is known of every row comes first, then a token of each row after the other: the most
        likely one (of equals the lowest id) behind all before it. Each is computed, the last one
        too: all may be taken. Rows are independent of one another.

        Raises StepInputsError when unknown tokens are not the end of a row that has others, or
        anything is out of range; the cache is then unchanged.
        """
        counts = _unknown_counts(inputs)
        if not counts.any():
            self._backend.execute(replace(inputs, logits_tokens=_NONE), self._logits)
            return inputs, _NONE
        unknown = inputs.token_ids == UNKNOWN_DRAFT
        guessed = replace(inputs, token_ids=np.where(unknown, np.int32(0), inputs.token_ids))
        self._check(guessed)
        ends = inputs.row_starts[1:]
        next_tokens = ends - counts
        rows = np.flatnonzero(counts)
        if len(self._logits) < len(rows):
            self._logits = self._room_for(inputs.num_rows)
        step = _known_part(inputs, counts)
        while len(rows):
            tokens = next_tokens[rows]
            guessed.token_ids[tokens] = self._most_likely(step)
            step = _single_tokens(guessed, rows, tokens)
            next_tokens[rows] += 1
            rows = rows[next_tokens[rows] < ends[rows]]
        self._backend.execute(step, self._logits)
        return guessed, guessed.token_ids[unknown]

    def _most_likely(self, step: StepInputs) -> npt.NDArray[np.int64]:
        """The likeliest token behind each of the step's logits tokens."""
        self._backend.execute(step, self._logits)
        found: npt.NDArray[np.int64] = self._logits[: step.num_logits].argmax(axis=1)
        return found

    def _check(self, inputs: StepInputs) -> None:
        """Refuse all of a step before its first part is computed."""
        facts = self._backend.facts
        inputs.check(
            vocabulary_size=facts.vocabulary_size,
            max_model_len=facts.max_model_len,
            num_blocks=facts.num_blocks,
            block_size=facts.block_size,
        )

    def _room_for(self, rows: int) -> Logits:
        return np.empty((rows, self._backend.facts.vocabulary_size), np.float32)


def _unknown_counts(inputs: StepInputs) -> Ints:
    """How many unknown tokens each row ends with, [R]. Raises StepInputsError for any elsewhere."""
    unknown = inputs.token_ids == UNKNOWN_DRAFT
    lengths = np.diff(inputs.row_starts)
    counts = np.add.reduceat(unknown, inputs.row_starts[:-1], dtype=np.int32)
    behind = np.arange(inputs.num_tokens) >= np.repeat(inputs.row_starts[1:] - counts, lengths)
    if (behind != unknown).any() or (counts == lengths).any():
        raise StepInputsError(
            f"step {inputs.step_id}: unknown tokens are not behind known ones of their rows"
        )
    return counts


def _known_part(inputs: StepInputs, counts: Ints) -> StepInputs:
    """All rows without their `counts` unknown tokens, and with the step's copies; logits of the
    last known token of each row that has unknown ones."""
    known = inputs.token_ids != UNKNOWN_DRAFT
    row_starts = inputs.row_starts.copy()
    row_starts[1:] -= counts.cumsum(dtype=np.int32)
    return replace(
        inputs,
        token_ids=inputs.token_ids[known],
        positions=inputs.positions[known],
        slots=inputs.slots[known],
        row_starts=row_starts,
        kv_lengths=inputs.kv_lengths - counts,
        logits_tokens=row_starts[1:][counts > 0] - 1,
    )


def _single_tokens(inputs: StepInputs, rows: npt.NDArray[np.int64], tokens: Ints) -> StepInputs:
    """One token of each of these rows, with logits where more of the row follow."""
    following = inputs.row_starts[rows + 1] - tokens - 1
    return StepInputs(
        step_id=inputs.step_id,
        token_ids=inputs.token_ids[tokens],
        positions=inputs.positions[tokens],
        slots=inputs.slots[tokens],
        row_starts=np.arange(len(rows) + 1, dtype=np.int32),
        kv_lengths=inputs.kv_lengths[rows] - following,
        logits_tokens=np.flatnonzero(following).astype(np.int32),
        copy_sources=_NONE,
        copy_targets=_NONE,
        block_tables=inputs.block_tables[rows],
    )
