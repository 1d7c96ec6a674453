"""Inputs and statistics that the sampler's tests share."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from triptych.kernels import cpu

Logits = NDArray[np.float32]


@contextmanager
def using_isa(name: str) -> Iterator[None]:
    """Run the block with one instruction set; the one before comes back."""
    before = cpu.active_isa()
    cpu.select_isa(name)
    try:
        yield
    finally:
        cpu.select_isa(before)


def random_logits(rng: np.random.Generator, rows: int, vocabulary: int) -> Logits:
    """Rows from flat to peaked; a tenth is -inf, and half of the matrices are full of ties."""
    spread = rng.choice([0.01, 1.0, 4.0, 20.0], (rows, 1))
    logits = rng.standard_normal((rows, vocabulary)) * spread
    logits[rng.random((rows, vocabulary)) < 0.1] = -np.inf
    if rng.random() < 0.5:
        logits = np.round(logits * 2) / 2  # makes -0.0 too
    return np.ascontiguousarray(logits, np.float32)


def chi_square_fits(counts: NDArray[np.int64], probabilities: NDArray[np.float64]) -> bool:
    """Pearson's test at about one in 10^5 (Wilson and Hilferty's approximation of the quantile)."""
    expected = probabilities / probabilities.sum() * counts.sum()
    assert expected.min() >= 5, "too few draws for the test to mean anything"
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(counts) - 1
    spread = 2 / (9 * freedom)
    limit: float = freedom * (1 - spread + 4.265 * spread**0.5) ** 3
    return statistic < limit
