"""Rows that are hard on a selection, on every instruction set; and the noise of single tokens."""

import numpy as np
import pytest
from numpy.typing import NDArray

from sampler_cases import Logits, chi_square_fits, random_logits, using_isa
from sampler_sequences import BOTH, MakeSampler, draw_one, draws
from triptych.kernels import cpu
from triptych.kernels.cpu.sampler import Sampler
from triptych.kernels.reference.philox import gumbel
from triptych.kernels.reference.sampler import Sampler as PlainSampler
from triptych.kernels.sampler_params import NO_TOKEN, SamplerParams

ISAS = pytest.mark.parametrize("isa", cpu.supported_isas())
TABLE = np.array([0.15, 0.4, 0.05, 0.3, 0.1])
LOGITS = np.log(TABLE).astype(np.float32)


def each_row(make: MakeSampler, logits: Logits, params: SamplerParams) -> NDArray[np.int32]:
    """A token per row; the sequences differ in their seeds alone."""
    sampler, rows = make(logits.shape[1]), range(len(logits))
    for sequence in rows:
        sampler.open(sequence, params._replace(seed=sequence), [], [])
    return sampler.draw(logits, rows, rows).token_ids


@ISAS
@pytest.mark.parametrize("top_p", [0.3, 0.9])
def test_a_flat_row_of_ties_under_top_p(isa: str, top_p: float) -> None:
    """All in one bin, all equal: the nucleus is the lowest ids."""
    row, params = np.zeros(5000, np.float32), SamplerParams(top_p=top_p)
    with using_isa(isa):
        tokens = draws(Sampler, row, params, 40)
    np.testing.assert_array_equal(tokens, draws(PlainSampler, row, params, 40))
    assert tokens.max() < np.ceil(np.float32(top_p) * 5000)
    assert tokens.max() > 0.75 * top_p * 5000


@ISAS
@pytest.mark.parametrize("slope", [1e-3, -1e-3])
def test_sorted_rows(isa: str, slope: float) -> None:
    """Ascending logits are the worst case of the streaming selection."""
    row = np.arange(6000, dtype=np.float32) * np.float32(slope)
    for params in (SamplerParams(top_k=40), SamplerParams(top_k=40, top_p=0.5), SamplerParams()):
        with using_isa(isa):
            tokens = draws(Sampler, row, params, 8)
        np.testing.assert_array_equal(tokens, draws(PlainSampler, row, params, 8))


@ISAS
def test_greedy_takes_the_lowest_of_equals(isa: str) -> None:
    rows = np.full((4, 3000), -1.0, np.float32)
    rows[0, [2000, 40, 2999]] = 5.0
    rows[1, 2999] = 5.0
    rows[2, [0, 1]] = 5.0
    rows[3, 7], rows[3, 5] = 0.0, -0.0
    with using_isa(isa):
        tokens = each_row(Sampler, rows, SamplerParams(temperature=0.0))
    assert tokens.tolist() == [40, 2999, 0, 5]


@ISAS
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_rows_leave_the_others_alone(isa: str, temperature: float) -> None:
    rows = random_logits(np.random.default_rng(1), 9, 2500)
    params = SamplerParams(temperature=temperature)
    with using_isa(isa):
        expected = each_row(Sampler, rows, params)
        rows[0, 0] = np.nan
        rows[2, 2499] = np.nan
        rows[3, 1100] = np.inf
        rows[5] = -np.inf
        rows[6] = np.nan
        rows[7, 1030] = -np.nan
        tokens = each_row(Sampler, rows, params)
    expected[[0, 2, 3, 5, 6, 7]] = NO_TOKEN
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_array_equal(each_row(PlainSampler, rows, params), expected)


@BOTH
def test_a_broken_logit_counts_even_where_it_is_banned(make: MakeSampler) -> None:
    for broken in (np.nan, np.inf):
        row = np.array([3.0, broken], np.float32)
        for params in (
            SamplerParams(allowed_token_ids=(0,)),
            SamplerParams(bad_words=((1,),)),
            SamplerParams(masked_token_ids=(1,), mask_until=1),
        ):
            assert draw_one(make, row, params) == NO_TOKEN


@BOTH
def test_filters_see_the_row_without_what_is_banned(make: MakeSampler) -> None:
    row = np.array([3.0, 2.0, 1.0], np.float32)
    for banned in (
        SamplerParams(allowed_token_ids=(1, 2)),
        SamplerParams(bad_words=((0,), (0,))),
        SamplerParams(masked_token_ids=(0, 0), mask_until=1),
    ):
        for params, support in (
            (banned, {1, 2}),
            (banned._replace(top_k=2), {1, 2}),
            (banned._replace(top_k=1), {1}),
            (banned._replace(temperature=0.0), {1}),
        ):
            assert set(draws(make, row, params, 60).tolist()) == support


def test_noise_of_a_token_depends_on_nothing_else() -> None:
    """The winner is argmax(logit / T + Gumbel), whatever else is in the vocabulary."""
    logits = random_logits(np.random.default_rng(4), 20, 900)
    logits[:, :10] = 1.0
    for size in (10, 300, 900):
        sampler = Sampler(size)
        for i in range(20):
            params = SamplerParams(temperature=0.8, seed=77, choice=i % 2)
            sampler.open(i, params, [5] * 3, [0] * i)
        tokens = sampler.draw(logits, range(20), range(20)).token_ids
        for i, token in enumerate(tokens.tolist()):
            score = logits[i, :size] / np.float32(0.8) + gumbel(np.arange(size), 77, i % 2, i)
            assert token == int(score.argmax())


@BOTH
def test_the_tokens_of_one_sequence_are_independent(make: MakeSampler) -> None:
    sampler = make(5)
    sampler.open(1, SamplerParams(seed=1234), [], [])
    tokens = []
    for _ in range(2501):
        tokens.append(sampler.draw(LOGITS[None], [1], [0]).token_ids)
        sampler.append([1], tokens[-1])
    output = np.concatenate(tokens)
    pairs = np.bincount(output[:-1] * 5 + output[1:], minlength=25)
    assert chi_square_fits(pairs, np.outer(TABLE, TABLE).ravel())


@BOTH
@pytest.mark.parametrize("key", ["seed", "choice"])
def test_seeds_are_independent_and_so_are_choices(make: MakeSampler, key: str) -> None:
    sampler = make(5)
    for number in range(3001):
        params = SamplerParams(choice=number) if key == "choice" else SamplerParams(seed=number)
        sampler.open(number, params, [], [])
    tokens = sampler.draw(LOGITS[None], range(3001), [0] * 3001).token_ids
    assert chi_square_fits(np.bincount(tokens, minlength=5), TABLE)
    pairs = np.bincount(tokens[:-1] * 5 + tokens[1:], minlength=25)
    assert chi_square_fits(pairs, np.outer(TABLE, TABLE).ravel())
