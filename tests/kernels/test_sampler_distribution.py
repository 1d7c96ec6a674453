"""Seeded draws against the closed-form distribution, and their support against theory (R22)."""

from collections.abc import Callable
from typing import TypedDict

import numpy as np
import pytest
from numpy.typing import NDArray

from sampler_cases import Logits, chi_square_fits, repeated, settings
from triptych.kernels.cpu.sampler import sample
from triptych.kernels.reference.sampler import sample as reference
from triptych.kernels.sample_columns import SampleColumns

Sampler = Callable[[Logits, SampleColumns, int], NDArray[np.int32]]
BOTH = pytest.mark.parametrize("sampler", [sample, reference], ids=["cpu", "reference"])

# Not in order of likelihood, so that ids and ranks differ.
TABLE = np.array([0.15, 0.4, 0.05, 0.3, 0.1])
LOGITS = np.log(TABLE).tolist()
V = len(TABLE)
DRAWS = 2000


class Options(TypedDict, total=False):
    temperature: float
    top_k: int
    top_p: float
    min_p: float


# settings -> the ids that may be drawn. Ranks: 1 (.4), 3 (.3), 0 (.15), 4 (.1), 2 (.05).
SUPPORTS: list[tuple[Options, set[int]]] = [
    ({}, {0, 1, 2, 3, 4}),
    ({"top_k": -1}, {0, 1, 2, 3, 4}),
    ({"top_k": 0}, {0, 1, 2, 3, 4}),
    ({"top_k": 1}, {1}),
    ({"top_k": 3}, {0, 1, 3}),
    ({"top_k": V}, {0, 1, 2, 3, 4}),
    ({"top_k": V + 1}, {0, 1, 2, 3, 4}),
    ({"top_k": 10**7}, {0, 1, 2, 3, 4}),
    ({"top_p": 0.0}, {1}),
    ({"top_p": 0.39}, {1}),
    ({"top_p": 0.41}, {1, 3}),
    ({"top_p": 0.69}, {1, 3}),
    ({"top_p": 0.71}, {0, 1, 3}),
    ({"top_p": 0.94}, {0, 1, 3, 4}),
    ({"top_p": 1.0}, {0, 1, 2, 3, 4}),
    ({"min_p": 0.0}, {0, 1, 2, 3, 4}),
    ({"min_p": 0.12}, {0, 1, 2, 3, 4}),
    ({"min_p": 0.13}, {0, 1, 3, 4}),
    ({"min_p": 0.3}, {0, 1, 3}),
    ({"min_p": 1.0}, {1}),
    # top_p counts the probability that top_k left: .4 and .3 are 82 % of the first three.
    ({"top_k": 3, "top_p": 0.8}, {1, 3}),
    # ... and is not renormalised after min_p, which comes last.
    ({"min_p": 0.3, "top_p": 0.8}, {0, 1, 3}),
    ({"top_k": 4, "top_p": 0.9, "min_p": 0.6}, {1, 3}),
    # top_p and min_p see probabilities at the temperature: .4^2, .3^2, .15^2 are 94 %.
    ({"temperature": 0.5, "top_p": 0.85}, {1, 3}),
    ({"temperature": 0.5, "min_p": 0.3}, {1, 3}),
    ({"temperature": 0.0, "top_p": 0.9}, {1}),
]


def draws(
    sampler: Sampler,
    rows: int = DRAWS,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> NDArray[np.int32]:
    columns = settings(rows, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    return sampler(repeated(LOGITS, rows), columns, V)


@pytest.mark.parametrize(("options", "support"), SUPPORTS, ids=[str(o) for o, _ in SUPPORTS])
def test_support_and_distribution(options: Options, support: set[int]) -> None:
    tokens = draws(sample, **options)
    np.testing.assert_array_equal(tokens[:200], draws(reference, 200, **options))
    assert set(tokens.tolist()) == support
    if len(support) > 1:
        ids = sorted(support)
        weights = TABLE[ids] ** (1 / options.get("temperature", 1.0))
        assert chi_square_fits(np.bincount(tokens, minlength=V)[ids], weights)


@BOTH
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 100.0])
def test_temperature(sampler: Sampler, temperature: float) -> None:
    tokens = draws(sampler, 6000 if sampler is sample else 1000, temperature=temperature)
    assert chi_square_fits(np.bincount(tokens, minlength=V), TABLE ** (1 / temperature))


@BOTH
def test_ties_at_the_border_go_to_the_lowest_ids(sampler: Sampler) -> None:
    rows = repeated([1.0, 2.0, 1.0, 1.0, 2.0, 1.0], 500)
    assert set(sampler(rows, settings(500, top_k=1), 6).tolist()) == {1}
    assert set(sampler(rows, settings(500, top_k=3), 6).tolist()) == {0, 1, 4}
    assert set(sampler(rows, settings(500, top_k=4), 6).tolist()) == {0, 1, 2, 4}
    assert set(sampler(rows, settings(500, top_p=0.0), 6).tolist()) == {1}
    # e / (2e + 4): 29 % each for 1 and 4, 11 % each for the others.
    assert set(sampler(rows, settings(500, top_p=0.6), 6).tolist()) == {0, 1, 4}
    # min_p cuts by probability, and equals have the same.
    assert set(sampler(rows, settings(500, min_p=1.0), 6).tolist()) == {1, 4}


@BOTH
def test_successive_positions_are_independent(sampler: Sampler) -> None:
    tokens = draws(sampler, 6001 if sampler is sample else 2501)
    pairs = np.bincount(tokens[:-1] * V + tokens[1:], minlength=V * V)
    assert chi_square_fits(pairs, np.outer(TABLE, TABLE).ravel())


@pytest.mark.parametrize("key", ["seed", "choice"])
def test_seeds_and_choices_are_independent(key: str) -> None:
    numbers = list(range(6000))
    columns = SampleColumns.of(temperature=[1.0] * 6000, **{key: numbers})  # type: ignore[arg-type]  # key names a column of integers
    tokens = sample(repeated(LOGITS, 6000), columns, V)
    assert chi_square_fits(np.bincount(tokens, minlength=V), TABLE)


def test_a_whole_vocabulary_is_drawn_evenly() -> None:
    rows = np.zeros((64, 49152), np.float32)
    tokens = np.concatenate([sample(rows, settings(64, seed=seed), 49152) for seed in range(30)])
    assert chi_square_fits(np.bincount(tokens * 16 // 49152, minlength=16), np.ones(16))
    assert chi_square_fits(np.bincount(tokens % 16, minlength=16), np.ones(16))


def test_same_key_same_token() -> None:
    np.testing.assert_array_equal(draws(sample), draws(sample))
    assert (draws(sample) != sample(repeated(LOGITS, DRAWS), settings(DRAWS, seed=5), V)).any()


def test_a_greedy_row_and_a_sampled_one_do_not_touch_each_other() -> None:
    rows = repeated(LOGITS, 200)
    mixed = SampleColumns.of(
        temperature=[0.0, 1.0] * 100, top_k=[0, 2] * 100, seed=[1234] * 200, position=range(200)
    )
    tokens = sample(rows, mixed, V)
    assert set(tokens[::2].tolist()) == {1}
    np.testing.assert_array_equal(tokens[1::2], draws(sample, 200, top_k=2)[1::2])
