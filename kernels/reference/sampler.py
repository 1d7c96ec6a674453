"""The plain meaning of sampling, in numpy and in float64. docs/sampling.md says it in words.

Tolerance of other implementations: none. They give the same tokens.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from triptych.kernels.reference.philox import gumbel
from triptych.kernels.reference.sampler_filters import kept
from triptych.kernels.reference.sampler_logprobs import token_logprobs
from triptych.kernels.reference.sequence_state import SequenceState
from triptych.kernels.sampler_params import (
    LARGEST_VOCABULARY,
    NO_LOGPROBS,
    NO_TOKEN,
    Drawn,
    Integers,
    SamplerParams,
    TokenLogprobs,
    check,
)


class Sampler:
    """`SamplerProtocol`, written to be read."""

    def __init__(self, vocabulary_size: int, *, processed_logprobs: bool = False) -> None:
        if not 1 <= vocabulary_size <= LARGEST_VOCABULARY:
            raise ValueError(
                f"vocabulary_size {vocabulary_size} is not within 1 and {LARGEST_VOCABULARY}"
            )
        self._size = vocabulary_size
        self._processed_logprobs = processed_logprobs
        self._sequences: dict[int, SequenceState] = {}

    def open(
        self, sequence_id: int, params: SamplerParams, prompt_ids: Integers, output_ids: Integers
    ) -> None:
        """A sequence begins, or goes on, with these tokens."""
        check(params)
        if sequence_id in self._sequences:
            raise ValueError(f"sequence {sequence_id} is open already")
        self._sequences[sequence_id] = SequenceState(params, self._size, prompt_ids, output_ids)

    def append(self, sequence_ids: Integers, token_ids: Integers) -> None:
        """One more output token for each."""
        if len(sequence_ids) != len(token_ids):
            raise ValueError("as many token_ids as sequence_ids are needed")
        sequences = [self._sequences[int(sequence_id)] for sequence_id in sequence_ids]
        for sequence, token in zip(sequences, token_ids, strict=True):
            sequence.output_ids.append(int(token))

    def close(self, sequence_id: int) -> None:
        """Forget a sequence."""
        del self._sequences[sequence_id]

    @property
    def open_sequences(self) -> int:
        """How many are open."""
        return len(self._sequences)

    def draw(
        self,
        logits: NDArray[np.float32],
        sequence_ids: Integers,
        logits_rows: Integers,
        allowed_masks: Sequence[NDArray[np.uint32] | None] | None = None,
    ) -> Drawn:
        """Draw a token for each sample."""
        rows = self._rows(logits, logits_rows, len(sequence_ids))
        masks = [None] * len(rows) if allowed_masks is None else allowed_masks
        if len(masks) != len(rows):
            raise ValueError("as many allowed_masks as samples are needed")
        for mask in masks:
            self._check_mask(mask)
        sequences = [self._sequences[int(sequence_id)] for sequence_id in sequence_ids]
        tokens = np.full(len(rows), NO_TOKEN, np.int32)
        logprobs: dict[int, TokenLogprobs] = {}
        for i, (row, sequence, mask) in enumerate(zip(rows, sequences, masks, strict=True)):
            token, of_token = self._draw(row, sequence, mask)
            tokens[i] = token
            if of_token is not None:
                logprobs[i] = of_token
        return Drawn(tokens, logprobs)

    def score(
        self, logits: NDArray[np.float32], logits_rows: Integers, token_ids: Integers, top: int
    ) -> list[TokenLogprobs | None]:
        """Logprobs of given tokens by the model's own logits."""
        rows = self._rows(logits, logits_rows, len(token_ids))
        if top < 0:
            raise ValueError("top is negative")
        for token in token_ids:
            if not 0 <= token < self._size:
                raise ValueError(f"token id {token} is not in the vocabulary")
        return [
            _row_logprobs(row, int(token), top) if _drawable(row) else None
            for row, token in zip(rows, token_ids, strict=True)
        ]

    def _draw(
        self, raw: NDArray[np.float32], sequence: SequenceState, mask: NDArray[np.uint32] | None
    ) -> tuple[int, TokenLogprobs | None]:
        if not _drawable(raw):
            return NO_TOKEN, None
        row = sequence.modified(raw, mask)
        if not _drawable(row):
            return NO_TOKEN, None
        params = sequence.params
        temperature = float(np.float32(params.temperature))
        order = _likeliest_first(row)
        distance = _distance(row, order, temperature or 1.0)
        token = int(order[0])
        if temperature > 0.0:
            places = kept(
                row, order, distance,
                top_n_sigma=float(np.float32(params.top_n_sigma)), top_k=params.top_k,
                typical_p=float(np.float32(params.typical_p)),
                top_p=float(np.float32(params.top_p)), min_p=float(np.float32(params.min_p)),
            )  # fmt: skip
            order, distance = order[places], distance[places]
            token = _noisiest(order, distance, params.seed, params.choice, sequence.position)
        if params.logprobs == NO_LOGPROBS:
            return token, None
        if self._processed_logprobs:
            return token, token_logprobs(order, distance, token, params.logprobs)
        return token, _row_logprobs(raw, token, params.logprobs)

    def _rows(
        self, logits: NDArray[np.float32], logits_rows: Integers, samples: int
    ) -> list[NDArray[np.float32]]:
        _check_logits(logits)
        if logits.shape[1] < self._size:
            raise ValueError(
                f"logits have rows of {logits.shape[1]}, fewer than the vocabulary's {self._size}"
            )
        if len(logits_rows) != samples:
            raise ValueError(f"{len(logits_rows)} logits_rows, expected {samples}")
        for row in logits_rows:
            if not 0 <= row < len(logits):
                raise ValueError(f"logits row {row} is not within 0 and {len(logits) - 1}")
        return [logits[int(row), : self._size] for row in logits_rows]

    def _check_mask(self, mask: NDArray[np.uint32] | None) -> None:
        if mask is None:
            return
        if mask.dtype != np.uint32:
            raise TypeError(f"allowed_masks must have dtype uint32, not {mask.dtype}")
        words = -(-self._size // 32)
        if mask.ndim != 1 or not mask.flags.c_contiguous or len(mask) < words:
            raise ValueError(f"an allowed mask is not a row of {words} words or more")


def _check_logits(logits: NDArray[np.float32]) -> None:
    if logits.dtype != np.float32:
        raise TypeError(f"logits must have dtype float32, not {logits.dtype}")
    if logits.ndim != 2 or not logits.flags.c_contiguous:
        raise ValueError("logits must be a C-contiguous matrix")


def _drawable(row: NDArray[np.float32]) -> bool:
    # NaN is not below infinity either.
    return bool((row < np.inf).all() and (row > -np.inf).any())


def _likeliest_first(row: NDArray[np.float32]) -> NDArray[np.int64]:
    """The finite ids; the sort is stable, so equal logits stay in the order of their ids."""
    order = np.argsort(-row, kind="stable")
    return order[row[order] > -np.inf]


def _distance(
    row: NDArray[np.float32], order: NDArray[np.int64], temperature: float
) -> NDArray[np.float64]:
    # Taking the maximum off before dividing keeps every temperature finite.
    ordered = row[order].astype(np.float64)
    distance: NDArray[np.float64] = (ordered[0] - ordered) * (1.0 / temperature)
    return distance


def _noisiest(
    order: NDArray[np.int64], distance: NDArray[np.float64], seed: int, choice: int, position: int
) -> int:
    score = gumbel(order, seed, choice, position) - distance
    return int(order[score == score.max()].min())


def _row_logprobs(row: NDArray[np.float32], token: int, top: int) -> TokenLogprobs:
    order = _likeliest_first(row)
    return token_logprobs(order, _distance(row, order, 1.0), token, top)
