"""The C++ sampler gives the tokens of the numpy one, on every instruction set."""

import numpy as np
import pytest
from numpy.typing import NDArray

from sampler_cases import random_columns, random_logits, repeated, settings, using_isa
from triptych.kernels import cpu
from triptych.kernels.cpu.sampler import sample
from triptych.kernels.reference.philox import gumbel
from triptych.kernels.reference.sampler import sample as reference
from triptych.kernels.sample_columns import SampleColumns

SMALL = [1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1023, 1025, 4099]


@pytest.mark.parametrize("isa", cpu.supported_isas())
@pytest.mark.parametrize("vocabulary", SMALL)
def test_same_tokens_as_the_reference(isa: str, vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    for _ in range(6):
        logits = random_logits(rng, 16, vocabulary)
        columns = random_columns(rng, 16, vocabulary)
        size = max(1, vocabulary - int(rng.integers(0, 3)))
        with using_isa(isa):
            tokens = sample(logits, columns, size)
        np.testing.assert_array_equal(tokens, reference(logits, columns, size))


@pytest.mark.parametrize("vocabulary", [49152, 50257])
def test_same_tokens_at_the_size_of_a_model(vocabulary: int) -> None:
    rng = np.random.default_rng(5)
    logits = random_logits(rng, 24, vocabulary)
    columns = random_columns(rng, 24, vocabulary)
    expected = reference(logits, columns, vocabulary)
    for isa in cpu.supported_isas():
        with using_isa(isa):
            np.testing.assert_array_equal(sample(logits, columns, vocabulary), expected)


@pytest.mark.parametrize("top_p", [0.3, 0.9])
@pytest.mark.parametrize("isa", cpu.supported_isas())
def test_a_flat_row_of_ties_under_top_p(isa: str, top_p: float) -> None:
    """All in one bin, all equal: the nucleus is the lowest ids."""
    rows = np.zeros((8, 5000), np.float32)
    with using_isa(isa):
        tokens = sample(rows, settings(8, top_p=top_p), 5000)
    np.testing.assert_array_equal(tokens, reference(rows, settings(8, top_p=top_p), 5000))
    assert tokens.max() < np.ceil(np.float32(top_p) * 5000)


@pytest.mark.parametrize("isa", cpu.supported_isas())
@pytest.mark.parametrize("slope", [1e-3, -1e-3])
def test_sorted_rows(isa: str, slope: float) -> None:
    """Ascending logits are the worst case of the streaming selection."""
    rows = np.tile(np.arange(6000, dtype=np.float32) * np.float32(slope), (4, 1))
    for columns in (settings(4, top_k=40), settings(4, top_k=40, top_p=0.5), settings(4)):
        with using_isa(isa):
            tokens = sample(rows, columns, 6000)
        np.testing.assert_array_equal(tokens, reference(rows, columns, 6000))


def test_greedy_takes_the_lowest_of_equals() -> None:
    rows = np.full((4, 3000), -1.0, np.float32)
    rows[0, [2000, 40, 2999]] = 5.0
    rows[1, 2999] = 5.0
    rows[2, [0, 1]] = 5.0
    rows[3, 7] = 0.0
    rows[3, 5] = -0.0
    for isa in cpu.supported_isas():
        with using_isa(isa):
            assert sample(rows, settings(4, temperature=0), 3000).tolist() == [40, 2999, 0, 5]
    assert reference(rows, settings(4, temperature=0), 3000).tolist() == [40, 2999, 0, 5]


@pytest.mark.parametrize("isa", cpu.supported_isas())
def test_bad_rows_give_minus_one_and_leave_the_others_alone(isa: str) -> None:
    rng = np.random.default_rng(1)
    rows = random_logits(rng, 9, 2500)
    columns = settings(9)
    with using_isa(isa):
        clean = sample(rows, columns, 2500)
        rows[0, 0] = np.nan
        rows[2, 2499] = np.nan
        rows[3, 1100] = np.inf
        rows[5] = -np.inf
        rows[6] = np.nan
        rows[7, 1030] = -np.nan
        tokens = sample(rows, columns, 2500)
    expected = clean.copy()
    expected[[0, 2, 3, 5, 6, 7]] = -1
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_array_equal(reference(rows, columns, 2500), expected)


def test_what_lies_beyond_the_vocabulary_does_not_matter() -> None:
    rows = repeated([1.0, 2.0, np.nan, np.inf], 50)
    for sampler in (sample, reference):
        assert set(sampler(rows, settings(50), 2).tolist()) == {0, 1}
        assert set(sampler(rows, settings(50, temperature=0), 2).tolist()) == {1}


def test_banned_ids() -> None:
    rows = repeated([3.0, 2.0, 1.0], 60)
    for sampler in (sample, reference):
        assert set(sampler(rows, settings(60, banned=(0,)), 3).tolist()) == {1, 2}
        assert set(sampler(rows, settings(60, banned=(0,), temperature=0), 3).tolist()) == {1}
        assert set(sampler(rows, settings(60, banned=(0, 2, 2)), 3).tolist()) == {1}
        # Filters see the row without them: the two most likely are now 1 and 2.
        assert set(sampler(rows, settings(60, banned=(0,), top_k=2), 3).tolist()) == {1, 2}
        # Ids outside the vocabulary ban nothing.
        assert set(sampler(rows, settings(60, banned=(-1, 3, 99)), 3).tolist()) == {0, 1, 2}


def test_nothing_left_to_draw_is_minus_one() -> None:
    rows = repeated([3.0, 2.0, -np.inf], 2)
    for sampler in (sample, reference):
        assert sampler(rows, settings(2, banned=(0, 1)), 3).tolist() == [-1, -1]
        assert sampler(rows, settings(2, banned=(0, 1), temperature=0), 3).tolist() == [-1, -1]


def test_a_bad_logit_counts_even_where_it_is_banned() -> None:
    rows = repeated([3.0, np.nan], 1)
    for sampler in (sample, reference):
        assert sampler(rows, settings(1, banned=(1,)), 2).tolist() == [-1]


@pytest.mark.parametrize("temperature", [1e-4, 1e-5, 1e-6, 1e-12, 1e-38, 1e-45, 5e-324])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
def test_temperature_towards_zero_is_greedy(temperature: float, scale: float) -> None:
    """reported-faults R19; float32 has no 5e-324, so that one is 0."""
    rows = repeated([2.0 * scale, 5.0 * scale, 3.5 * scale, -scale], 50)
    for sampler in (sample, reference):
        for columns in (
            settings(50, temperature=temperature),
            settings(50, temperature=temperature, top_p=1e-4),
            settings(50, temperature=temperature, top_k=3, top_p=0.99, min_p=0.5),
        ):
            assert set(sampler(rows, columns, 4).tolist()) == {1}


def test_a_row_does_not_depend_on_its_batch() -> None:
    rng = np.random.default_rng(9)
    logits, columns = random_logits(rng, 12, 700), random_columns(rng, 12, 700)
    together = sample(logits, columns, 700)
    for _ in range(4):
        order = rng.permutation(12)
        np.testing.assert_array_equal(
            sample(logits[order], _take(columns, order), 700), together[order]
        )
    for i in range(12):
        alone = sample(logits[i : i + 1], _take(columns, np.array([i])), 700)
        assert alone.tolist() == [together[i]]


def test_noise_of_a_token_depends_on_nothing_else() -> None:
    """The winner is argmax(logit / T + Gumbel), whatever else is in the vocabulary."""
    rng = np.random.default_rng(4)
    logits = random_logits(rng, 20, 900)
    logits[:, :10] = 1.0
    for size in (10, 300, 900):
        tokens = sample(logits, settings(20, temperature=0.8, seed=77), size)
        for i, token in enumerate(tokens.tolist()):
            score = logits[i, :size] / np.float32(0.8) + gumbel(np.arange(size), 77, 0, i)
            assert token == int(score.argmax())


def test_no_rows() -> None:
    for sampler in (sample, reference):
        tokens = sampler(np.zeros((0, 8), np.float32), settings(0), 8)
        assert tokens.shape == (0,)
        assert tokens.dtype == np.int32


def _take(columns: SampleColumns, rows: NDArray[np.int64]) -> SampleColumns:
    starts = columns.banned_starts
    return SampleColumns.of(
        temperature=columns.temperature[rows].tolist(),
        top_k=columns.top_k[rows].tolist(),
        top_p=columns.top_p[rows].tolist(),
        min_p=columns.min_p[rows].tolist(),
        seed=columns.seed[rows].tolist(),
        choice=columns.choice[rows].tolist(),
        position=columns.position[rows].tolist(),
        banned=[columns.banned_ids[starts[i] : starts[i + 1]].tolist() for i in rows],
    )
