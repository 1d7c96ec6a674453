"""The plain meaning of sampling, in numpy and in float64. docs/sampling.md says it in words.

Tolerance of other implementations: none. They give the same tokens.
"""

import math

import numpy as np
from numpy.typing import NDArray

from triptych.kernels.reference.philox import gumbel
from triptych.kernels.sample_columns import SampleColumns, SampleTuple

NO_TOKEN = -1


def sample_rows(
    logits: NDArray[np.float32], rows: list[SampleTuple], vocabulary_size: int
) -> list[int]:
    """`sample` with its values as one tuple per row."""
    tokens: list[int] = sample(logits, SampleColumns.of_rows(rows), vocabulary_size).tolist()
    return tokens


def sample(
    logits: NDArray[np.float32], columns: SampleColumns, vocabulary_size: int
) -> NDArray[np.int32]:
    """Draw one token per row of `logits` [rows, at least vocabulary_size] -> int32 [rows].

    The contract, errors included, is that of `kernels.cpu.sampler.sample`.
    """
    if logits.dtype != np.float32:
        raise TypeError(f"logits must have dtype float32, not {logits.dtype}")
    if logits.ndim != 2 or not logits.flags.c_contiguous:
        raise ValueError("logits must be a C-contiguous matrix")
    if not 1 <= vocabulary_size <= logits.shape[1]:
        raise ValueError(
            f"vocabulary_size {vocabulary_size} is not within 1 and "
            f"the row length {logits.shape[1]}"
        )
    if len(columns) != len(logits):
        raise ValueError(f"columns have {len(columns)} entries, expected {len(logits)}")
    tokens = [_sample_row(logits[i, :vocabulary_size], columns, i) for i in range(len(logits))]
    return np.array(tokens, np.int32)


def _sample_row(logits: NDArray[np.float32], columns: SampleColumns, i: int) -> int:
    if not (logits < np.inf).all():  # NaN is not below infinity either
        return NO_TOKEN
    allowed = logits > -np.inf
    banned = columns.banned_ids[columns.banned_starts[i] : columns.banned_starts[i + 1]]
    allowed[banned[(banned >= 0) & (banned < len(logits))]] = False
    if not allowed.any():
        return NO_TOKEN

    # Most likely first; the sort is stable, so equal logits stay in the order of their ids.
    order = np.argsort(-logits, kind="stable")
    order = order[allowed[order]]
    temperature = float(columns.temperature[i])
    if temperature == 0.0:
        return int(order[0])

    # Taking the maximum off before dividing keeps every temperature finite.
    ordered = logits[order].astype(np.float64)
    distance = (ordered[0] - ordered) * (1.0 / temperature)
    kept = _kept(distance, int(columns.top_k[i]), float(columns.top_p[i]), float(columns.min_p[i]))
    order, distance = order[:kept], distance[:kept]
    noise = gumbel(order, int(columns.seed[i]), int(columns.choice[i]), int(columns.position[i]))
    score = noise - distance
    return int(order[score == score.max()].min())


def _kept(distance: NDArray[np.float64], top_k: int, top_p: float, min_p: float) -> int:
    """How many of the ids, most likely first and `distance` nats below the first, may be drawn."""
    kept = len(distance)
    if top_k > 0:
        kept = min(kept, top_k)
    if top_p < 1.0:
        # Fixed-point masses: their sum does not depend on the order of adding.
        mass = np.floor(np.exp(-distance[:kept]) * 2.0**44).astype(np.int64)
        before = np.cumsum(mass) - mass
        kept = max(1, int(np.count_nonzero(before < top_p * float(mass.sum()))))
    if min_p > 0.0:
        kept = int(np.count_nonzero(distance[:kept] <= -math.log(min_p)))
    return kept
