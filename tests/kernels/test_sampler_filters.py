"""Filters and temperature: seeded draws against closed-form tables, and against Hugging Face (R22).

The tables are not in order of likelihood, so that ids and ranks differ.
"""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from sampler_cases import chi_square_fits
from sampler_sequences import BOTH, MakeSampler, draw_one, draws, logprobs_of
from triptych.kernels.cpu.sampler import Sampler
from triptych.kernels.reference.sampler import Sampler as PlainSampler
from triptych.kernels.sampler_params import SamplerParams

TABLE = np.array([0.15, 0.4, 0.05, 0.3, 0.1])
LOGITS = np.log(TABLE).astype(np.float32)
ALL = {0, 1, 2, 3, 4}
DRAWS = 2000
# Information minus entropy (1.393 nats): 1 -0.48, 3 -0.19, 0 +0.50, 4 +0.91, 2 +1.60.
# Logits' deviation 0.7297 (population), so the distances 0.29, 0.98, 1.39, 2.08 of 3, 0, 4, 2 from
# the peak are 0.39, 1.34, 1.90, 2.85 sigma.

# settings -> the ids that may be drawn. Ranks: 1 (.4), 3 (.3), 0 (.15), 4 (.1), 2 (.05).
SUPPORTS: list[tuple[SamplerParams, set[int]]] = [
    (SamplerParams(), ALL),
    (SamplerParams(top_k=-1), ALL),
    (SamplerParams(top_k=1), {1}),
    (SamplerParams(top_k=3), {0, 1, 3}),
    (SamplerParams(top_k=5), ALL),
    (SamplerParams(top_k=6), ALL),
    (SamplerParams(top_k=10**7), ALL),
    (SamplerParams(top_k=2**40), ALL),
    (SamplerParams(top_p=0.0), {1}),
    (SamplerParams(top_p=0.39), {1}),
    (SamplerParams(top_p=0.41), {1, 3}),
    (SamplerParams(top_p=0.69), {1, 3}),
    (SamplerParams(top_p=0.71), {0, 1, 3}),
    (SamplerParams(top_p=0.94), {0, 1, 3, 4}),
    (SamplerParams(min_p=0.12), ALL),
    (SamplerParams(min_p=0.13), {0, 1, 3, 4}),
    (SamplerParams(min_p=0.3), {0, 1, 3}),
    (SamplerParams(min_p=1.0), {1}),
    (SamplerParams(typical_p=0.0), {3}),
    (SamplerParams(typical_p=0.29), {3}),
    (SamplerParams(typical_p=0.31), {1, 3}),
    (SamplerParams(typical_p=0.69), {1, 3}),
    (SamplerParams(typical_p=0.71), {0, 1, 3}),
    (SamplerParams(typical_p=0.96), ALL),
    (SamplerParams(top_n_sigma=0.3), {1}),
    (SamplerParams(top_n_sigma=0.5), {1, 3}),
    (SamplerParams(top_n_sigma=1.5), {0, 1, 3}),
    (SamplerParams(top_n_sigma=2.0), {0, 1, 3, 4}),
    (SamplerParams(top_n_sigma=3.0), ALL),
    # Sigma is of the logits, so the temperature does not matter to it.
    (SamplerParams(top_n_sigma=1.5, temperature=3.0), {0, 1, 3}),
    # top_p counts the probability that top_k left: .4 and .3 are 82 % of the first three.
    (SamplerParams(top_k=3, top_p=0.8), {1, 3}),
    # ... and is not renormalised after min_p, which comes last.
    (SamplerParams(min_p=0.3, top_p=0.8), {0, 1, 3}),
    (SamplerParams(top_k=4, top_p=0.9, min_p=0.6), {1, 3}),
    # typical_p leaves 3 alone, although it is not the most likely: what follows starts from it.
    (SamplerParams(typical_p=0.2, top_p=0.5, min_p=1.0), {3}),
    # Of the first three, 3 and then 1 are nearest to their mean: 82 %.
    (SamplerParams(top_k=3, typical_p=0.8), {1, 3}),
    (SamplerParams(top_n_sigma=1.5, typical_p=0.8, top_p=0.5), {1}),
    # top_p and min_p see probabilities at the temperature: .4^2, .3^2, .15^2 are 94 %.
    (SamplerParams(temperature=0.5, top_p=0.85), {1, 3}),
    (SamplerParams(temperature=0.5, min_p=0.3), {1, 3}),
    (SamplerParams(temperature=0.0, top_p=0.9), {1}),
]


@pytest.mark.parametrize(("params", "support"), SUPPORTS)
def test_support_and_distribution(params: SamplerParams, support: set[int]) -> None:
    tokens = draws(Sampler, LOGITS, params, DRAWS)
    np.testing.assert_array_equal(tokens[:100], draws(PlainSampler, LOGITS, params, 100))
    assert set(tokens.tolist()) == support
    if len(support) > 1:
        ids = sorted(support)
        weights = TABLE[ids] ** (1 / params.temperature)
        assert chi_square_fits(np.bincount(tokens, minlength=5)[ids], weights)


@BOTH
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 100.0])
def test_temperature(make: MakeSampler, temperature: float) -> None:
    tokens = draws(make, LOGITS, SamplerParams(temperature=temperature), 4000)
    assert chi_square_fits(np.bincount(tokens, minlength=5), TABLE ** (1 / temperature))


@BOTH
@pytest.mark.parametrize("temperature", [1e-4, 1e-5, 1e-6, 1e-12, 1e-38, 1e-45, 5e-324])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
def test_temperature_towards_zero_is_greedy(
    make: MakeSampler, temperature: float, scale: float
) -> None:
    """reported-faults R19; float32 has no 5e-324, so that one is 0."""
    row = np.array([2.0, 5.0, 3.5, -1.0], np.float32) * np.float32(scale)
    for params in (
        SamplerParams(),
        SamplerParams(top_p=1e-4),
        SamplerParams(top_k=3, top_p=0.99, min_p=0.5),
        SamplerParams(typical_p=0.5, top_n_sigma=5.0),
    ):
        cold = params._replace(temperature=temperature)
        assert set(draws(make, row, cold, 20).tolist()) == {1}
        assert not np.isnan(list(logprobs_of(make, row, cold).values())).any()


@BOTH
def test_greedy_takes_the_lowest_of_equals(make: MakeSampler) -> None:
    row = np.full(3000, -1.0, np.float32)
    row[[2000, 40, 2999]] = 5.0
    assert draw_one(make, row, SamplerParams(temperature=0.0)) == 40
    row[:] = -1.0
    row[5], row[7] = -0.0, 0.0
    assert draw_one(make, row, SamplerParams(temperature=0.0)) == 5


@BOTH
def test_ties_at_the_border(make: MakeSampler) -> None:
    """top_k and top_p go to the lowest ids; the others keep all equals."""
    row = np.array([1.0, 2.0, 1.0, 1.0, 2.0, 1.0], np.float32)
    for params, support in (
        (SamplerParams(top_k=1), {1}),
        (SamplerParams(top_k=3), {0, 1, 4}),
        (SamplerParams(top_p=0.0), {1}),
        # e / (2e + 4): 29 % each for 1 and 4, 11 % each for the others.
        (SamplerParams(top_p=0.6), {0, 1, 4}),
        (SamplerParams(min_p=1.0), {1, 4}),
        (SamplerParams(typical_p=0.1), {1, 4}),
        (SamplerParams(top_n_sigma=0.1), {1, 4}),
    ):
        assert set(draws(make, row, params, 400).tolist()) == support


@BOTH
def test_seeds_choices_and_positions_are_independent(make: MakeSampler) -> None:
    count = 4000
    sampler = make(5)
    for sequence in range(count):
        params = SamplerParams(seed=sequence % 10, choice=sequence // 10 % 20)
        sampler.open(sequence, params, [], [0] * (sequence // 200))
    tokens = sampler.draw(LOGITS[None], range(count), [0] * count).token_ids
    assert chi_square_fits(np.bincount(tokens, minlength=5), TABLE)
    pairs = np.bincount(tokens[:-1] * 5 + tokens[1:], minlength=25)
    assert chi_square_fits(pairs, np.outer(TABLE, TABLE).ravel())


def test_a_whole_vocabulary_is_drawn_evenly() -> None:
    tokens = draws(Sampler, np.zeros(49152, np.float32), SamplerParams(), 1500)
    assert chi_square_fits(np.bincount(tokens * 16 // 49152, minlength=16), np.ones(16))
    assert chi_square_fits(np.bincount(tokens % 16, minlength=16), np.ones(16))


def hugging_face(warper: LogitsProcessor, row: NDArray[np.float32]) -> set[int]:
    """What a warper leaves of a row."""
    scores = warper(torch.zeros(1, 0, dtype=torch.long), torch.from_numpy(row.astype(float))[None])
    return set(torch.nonzero(scores[0] > -torch.inf)[:, 0].tolist())


@BOTH
@pytest.mark.parametrize("seed", range(8))
def test_supports_are_hugging_face_s(make: MakeSampler, seed: int) -> None:
    """On random rows without ties, each filter alone; temperature 1."""
    rng = np.random.default_rng(seed)
    row = (rng.standard_normal(400) * rng.choice([0.5, 2.0, 6.0])).astype(np.float32)
    for params, warper in (
        (SamplerParams(top_k=37), TopKLogitsWarper(37)),
        (SamplerParams(top_p=0.8), TopPLogitsWarper(0.8)),
        (SamplerParams(min_p=0.05), MinPLogitsWarper(0.05)),
        (SamplerParams(typical_p=0.3), TypicalLogitsWarper(0.3)),
        (SamplerParams(typical_p=0.9), TypicalLogitsWarper(0.9)),
    ):
        assert logprobs_of(make, row, params).keys() == hugging_face(warper, row)


@BOTH
def test_sigma_is_the_population_s_over_finite_logits(make: MakeSampler) -> None:
    rng = np.random.default_rng(6)
    row = (rng.standard_normal(999) * 3).astype(np.float32)
    row[rng.random(999) < 0.2] = -np.inf
    finite = row[row > -np.inf].astype(np.float64)
    for n in (0.5, 1.0, 2.0):
        expected = np.flatnonzero(row >= finite.max() - n * finite.std())
        assert logprobs_of(make, row, SamplerParams(top_n_sigma=n)).keys() == set(expected.tolist())
