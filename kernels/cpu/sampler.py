"""The C++ sampler. Same call and same tokens as `kernels.reference.sampler`; docs/sampling.md."""

import numpy as np
from numpy.typing import NDArray

from triptych.kernels.cpu import _cpu
from triptych.kernels.sample_columns import SampleColumns, SampleTuple


def sample(
    logits: NDArray[np.float32], columns: SampleColumns, vocabulary_size: int
) -> NDArray[np.int32]:
    """Draw one token per row of `logits` [rows, at least vocabulary_size] -> int32 [rows].

    Reads `logits` in place (a read-only view will do) and releases the GIL: the caller keeps the
    matrix as it is until the call returns. Only ids below `vocabulary_size` are drawn. A row gives
    -1 if it has a NaN or +inf there, or nothing that may be drawn; other rows do not notice.

    Raises TypeError for another dtype; ValueError for a matrix that is not 2-D and C-contiguous,
    for columns of another length, and for a vocabulary_size outside 1..row length.
    """
    return _cpu.sample(
        logits,
        columns.temperature,
        columns.top_k,
        columns.top_p,
        columns.min_p,
        columns.seed,
        columns.choice,
        columns.position,
        columns.banned_ids,
        columns.banned_starts,
        vocabulary_size,
    )


def sample_rows(
    logits: NDArray[np.float32], rows: list[SampleTuple], vocabulary_size: int
) -> list[int]:
    """`sample` with its values as one tuple per row: the scheduler's call, without numpy between.

    Raises TypeError and ValueError as `sample` does, and as SampleColumns for values out of range.
    """
    return _cpu.sample_rows(logits, rows, vocabulary_size)
