"""Inputs and statistics that the sampler's tests share."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from triptych.kernels import cpu
from triptych.kernels.sample_columns import SampleColumns

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


def random_columns(rng: np.random.Generator, rows: int, vocabulary: int) -> SampleColumns:
    """Settings with every border value among them, drawn per row."""
    return SampleColumns.of(
        temperature=rng.choice([0.0, 1e-40, 1e-4, 0.1, 0.7, 1.0, 2.0, 100.0], rows).tolist(),
        top_k=rng.choice([-1, 0, 1, 2, 50, vocabulary // 2 + 1, vocabulary, 10**7], rows).tolist(),
        top_p=rng.choice([0.0, 1e-4, 0.1, 0.5, 0.9, 0.999, 1.0, 1.0], rows).tolist(),
        min_p=rng.choice([0.0, 0.0, 0.01, 0.3, 1.0], rows).tolist(),
        seed=rng.integers(0, 2**64, rows, np.uint64).tolist(),
        choice=rng.integers(0, 4, rows).tolist(),
        position=rng.integers(0, 2**32, rows).tolist(),
        banned=[rng.integers(-1, vocabulary + 2, rng.integers(0, 4)).tolist() for _ in range(rows)],
    )


def repeated(logits: list[float], rows: int) -> Logits:
    """The same row, `rows` times."""
    return np.tile(np.array(logits, np.float32), (rows, 1))


def settings(
    rows: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 1234,
    banned: tuple[int, ...] = (),
) -> SampleColumns:
    """The same settings for every row; row i is output position i."""
    return SampleColumns.of(
        temperature=[temperature] * rows,
        top_k=[top_k] * rows,
        top_p=[top_p] * rows,
        min_p=[min_p] * rows,
        seed=[seed] * rows,
        position=list(range(rows)),
        banned=[banned] * rows,
    )


def chi_square_fits(counts: NDArray[np.int64], probabilities: NDArray[np.float64]) -> bool:
    """Pearson's test at about one in 10^5 (Wilson and Hilferty's approximation of the quantile)."""
    expected = probabilities / probabilities.sum() * counts.sum()
    assert expected.min() >= 5, "too few draws for the test to mean anything"
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(counts) - 1
    spread = 2 / (9 * freedom)
    limit: float = freedom * (1 - spread + 4.265 * spread**0.5) ** 3
    return statistic < limit
