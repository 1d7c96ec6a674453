"""Which samples of a step the executor's device draws, and the part of the step that tells it how.

The others are drawn here, from their rows of the logits ring: where a sequence has a grammar, a
plug-in, guesses, or parameters that the device does not know, or where its history has no room.
Both draw the same tokens (docs/sampling.md), so a sequence may change sides at any step.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from triptych.engine_core.batch import Score
from triptych.engine_core.layout import (
    DEVICE_HEADER,
    DEVICE_HEADER_OFFSET,
    MAX_SAMPLE_LOGPROBS,
    PREVIOUS_SAMPLE,
    SAMPLE_COLUMNS,
    STEP_HEADER,
    StepLayout,
)
from triptych.engine_core.sampling_params import NO_LOGPROBS, SamplingParams
from triptych.services.scheduler.running_grammars import LAST

Ints = NDArray[np.int32]

_POSITION = SAMPLE_COLUMNS.index("position")
_LOGPROBS = SAMPLE_COLUMNS.index("logprobs")
_REPETITIONS = (0.01, 100.0)
"""Of repetition penalties: no logit that is a number becomes an infinity by one of these, so that
nothing can be drawn only where the model's own logits are broken."""
_LARGEST_INT = 2**31 - 1
_FIRST_ROWS = 64
_NONE = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class StepSamples:
    """A step's samples: of sequence_ids[i] (int64), from row logits_rows[i] (int32).

    `previous` (int32), of a step ahead: the sample of the step before that draws the sequence's
    last token, -1 where all its tokens are known. `drafts` (int32), of others: as Batch.drafts().
    """

    sequence_ids: "array[int]"
    logits_rows: "array[int]"
    previous: "array[int] | None" = None
    drafts: "array[int] | None" = None


@dataclass(frozen=True, slots=True)
class DeviceSamples:
    """What the device was asked for: the samples that it draws (bool [S]), and how many most likely
    tokens each reports (int32 [S], NO_LOGPROBS for no logprobs); ids below `vocabulary_size`."""

    drawn: NDArray[np.bool_]
    logprobs: Ints
    vocabulary_size: int

    @property
    def num_drawn(self) -> int:
        """Samples that the device draws."""
        return int(np.count_nonzero(self.drawn))

    def host(self) -> list[int]:
        """The samples that are left to the scheduler."""
        found: list[int] = np.flatnonzero(~self.drawn).tolist()
        return found


@dataclass(frozen=True, slots=True)
class _History:
    """Of a sequence with penalties: which tokens its prompt has, where that matters (`num_prompt`
    of them), then its output."""

    tokens: "array[int]"
    num_prompt: int


class DeviceSampling:
    """What of every running sequence goes into its sample: constant columns, position, history.

    Told of sequences as a SamplingState is. Used by the loop's thread only.
    """

    def __init__(
        self, layout: StepLayout, vocabulary_size: int, *, processed_logprobs: bool
    ) -> None:
        """`processed_logprobs`: as of the sampler; the device has those of the model's own."""
        self._layout = layout
        self._max_history = layout.max_history
        self._vocabulary_size = vocabulary_size
        self._processed_logprobs = processed_logprobs
        self._row_of: dict[int, int] = {}
        self._free: list[int] = []
        self._columns = np.zeros((0, len(SAMPLE_COLUMNS)), np.int32)
        self._draws_from = np.zeros(0, np.int64)  # the first position that the device may draw
        self._histories: dict[int, _History] = {}

    def __len__(self) -> int:
        """Sequences that are open."""
        return len(self._row_of)

    # ------------------------------------------------------------------ sequences

    def open(
        self,
        sequence_id: int,
        params: SamplingParams,
        choice: int,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
    ) -> None:
        """A sequence runs, with these tokens."""
        if not self._free:
            self._grow()
        row = self._row_of[sequence_id] = self._free.pop()
        first = self._first_position(params)
        self._draws_from[row] = first
        self._columns[row] = 0
        self._columns[row, _POSITION] = len(output_ids)
        if first > _LARGEST_INT:
            return
        self._columns[row] = _columns_of(params, choice, len(output_ids))
        repeats = params.repetition_penalty != 1.0
        if repeats or params.presence_penalty or params.frequency_penalty:
            bound = self._vocabulary_size
            seen = sorted(each for each in set(prompt_ids) if each < bound) if repeats else []
            self._histories[sequence_id] = _History(array("i", [*seen, *output_ids]), len(seen))

    def append(self, sequence_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """One more output token for each."""
        rows = [self._row_of[sequence_id] for sequence_id in sequence_ids]
        np.add.at(self._columns[:, _POSITION], rows, 1)
        if self._histories:
            for sequence_id, token_id in zip(sequence_ids, token_ids, strict=True):
                history = self._histories.get(sequence_id)
                if history is not None:
                    history.tokens.append(token_id)

    def close(self, sequence_id: int) -> None:
        """A sequence runs no more."""
        self._free.append(self._row_of.pop(sequence_id))
        self._histories.pop(sequence_id, None)

    def _first_position(self, params: SamplingParams) -> int:
        """From which output token on the device may draw; _LARGEST_INT + 1 for never."""
        low, high = _REPETITIONS
        known = (
            not params.grammar
            and not params.processors
            and not params.logit_bias
            and params.allowed_token_ids is None
            and not params.bad_words
            and params.no_repeat_ngram_size == 0
            and params.typical_p >= 1.0
            and params.top_n_sigma == 0.0
            and params.beam is None
            and params.external is None
            and low <= params.repetition_penalty <= high
            and params.logprobs <= MAX_SAMPLE_LOGPROBS
            and (params.logprobs == NO_LOGPROBS or not self._processed_logprobs)
        )
        if not known:
            return _LARGEST_INT + 1
        return params.min_tokens if params.stop_token_ids else 0

    def _grow(self) -> None:
        old = len(self._columns)
        new = max(_FIRST_ROWS, 2 * old)
        self._free = list(range(new - 1, old - 1, -1))
        self._columns = np.resize(self._columns, (new, len(SAMPLE_COLUMNS)))
        self._draws_from = np.resize(self._draws_from, new)

    # ------------------------------------------------------------------ a step

    def write(
        self, slot: memoryview, samples: StepSamples, scores: Sequence[Score] = ()
    ) -> DeviceSamples | None:
        """The sampling part of a slot whose other parts are written; what the device draws.

        None, and nothing is written: all samples are the scheduler's, and all rows of logits come.
        `scores`: rows of logits that are wanted here, too.
        """
        count, layout = len(samples.sequence_ids), self._layout
        if not 0 < count <= layout.max_samples:
            return None
        rows = [self._row_of[sequence_id] for sequence_id in samples.sequence_ids]
        columns = self._columns[rows]
        if samples.previous is not None:
            columns[:, _POSITION] += np.frombuffer(samples.previous, np.int32) >= 0
        drawn = self._draws_from[rows] <= columns[:, _POSITION]
        if samples.drafts is not None:
            drawn &= ~_guessed(np.frombuffer(samples.drafts, np.int32))
        starts, prompts, history = self._history(samples, drawn)
        if not drawn.any():
            return None
        logits_rows = np.frombuffer(samples.logits_rows, np.int32)
        _, _, _, num_logits, _ = STEP_HEADER.unpack_from(slot)
        host = _host_rows(num_logits, logits_rows[~drawn], scores)
        for name, values in (
            ("sample_rows", np.where(drawn, logits_rows, -1)),
            ("sample_params", columns),
            ("history_starts", starts),
            ("history_prompts", prompts),
            ("history", history),
            ("host_logits", host),
        ):
            offset, _ = layout.arrays[name]
            np.frombuffer(slot, np.int32, values.size, offset)[:] = values.reshape(-1)
        stores, loads, *_ = DEVICE_HEADER.unpack_from(slot, DEVICE_HEADER_OFFSET)
        DEVICE_HEADER.pack_into(
            slot, DEVICE_HEADER_OFFSET,
            stores, loads, count, len(history), len(host), self._vocabulary_size,
        )  # fmt: skip
        return DeviceSamples(drawn, columns[:, _LOGPROBS].copy(), self._vocabulary_size)

    def _history(self, samples: StepSamples, drawn: NDArray[np.bool_]) -> tuple[Ints, Ints, Ints]:
        """history_starts, history_prompts, history. Samples whose history has no room any more
        are `drawn` no longer."""
        count = len(drawn)
        prompts = np.zeros(count, np.int32)
        if not self._histories:
            return np.zeros(count + 1, np.int32), prompts, _NONE
        starts, history = array("i", [0]), array("i")
        previous = samples.previous or array("i", [-1]) * count
        for sample, on_device in enumerate(drawn.tolist()):
            kept = self._histories.get(samples.sequence_ids[sample]) if on_device else None
            if kept is not None:
                before = previous[sample]
                if len(history) + len(kept.tokens) + (before >= 0) > self._max_history:
                    drawn[sample] = False
                else:
                    history += kept.tokens
                    prompts[sample] = kept.num_prompt
                    if before >= 0:
                        history.append(PREVIOUS_SAMPLE - before)
            starts.append(len(history))
        return np.frombuffer(starts, np.int32), prompts, np.frombuffer(history, np.int32)


def _columns_of(params: SamplingParams, choice: int, position: int) -> Ints:
    floats = np.array(
        [
            params.temperature,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        ],
        np.float32,
    )
    numbers = np.array(
        [
            min(params.top_k, _LARGEST_INT),
            params.seed & 0xFFFF_FFFF,
            params.seed >> 32,
            choice,
            position,
            params.logprobs,
        ],
        np.int64,
    )
    return np.concatenate([floats.view(np.int32), numbers.astype(np.uint32).view(np.int32)])


def _guessed(drafts: Ints) -> NDArray[np.bool_]:
    """Samples of sequences with drafts: one is behind them, or was before."""
    guessed: NDArray[np.bool_] = drafts != LAST
    guessed[1:] |= drafts[:-1] != LAST
    return guessed


def _host_rows(num_logits: int, rows: Ints, scores: Sequence[Score]) -> Ints:
    """The rows of logits that are wanted here, ascending."""
    wanted = np.zeros(num_logits, np.bool_)
    wanted[rows] = True
    for score in scores:
        wanted[score.logits_row : score.logits_row + score.num_positions] = True
    return np.flatnonzero(wanted).astype(np.int32)
