"""The device's sampler gives the host's tokens."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from device_samples import Ask, columns, host_tokens, random_ask
from sampler_cases import random_logits
from triptych.kernels.sampler_params import SamplerParams
from triptych.kernels.triton.sampler import Features, sample, sampler_workspace


def device_tokens(
    logits: NDArray[np.float32],
    asks: list[Ask],
    vocabulary: int,
    features: Features = Features(),  # noqa: B008 - a value
) -> list[int]:
    out = torch.full((len(asks),), -7, dtype=torch.int32)
    room = sampler_workspace(len(asks) + 1, vocabulary, torch.get_default_device(), piece=64)
    sample(torch.tensor(logits), columns(asks), vocabulary, out, room, features)
    tokens: list[int] = out.tolist()
    return tokens


@pytest.mark.parametrize(("vocabulary", "seed"), [(7, 1), (50, 2), (300, 3)])
def test_any_samples(vocabulary: int, seed: int) -> None:
    rng = np.random.default_rng([seed, vocabulary])
    logits = random_logits(rng, 6, vocabulary + 3)
    logits += rng.choice([-60, 0, 0, 9], (6, 1)).astype(np.float32)
    asks = [random_ask(rng, 6, vocabulary) for _ in range(12 if vocabulary < 100 else 3)]
    assert device_tokens(logits, asks, vocabulary) == host_tokens(logits, asks, vocabulary)


def test_plain_samples() -> None:
    """Noise alone: each draw with its own seed or position."""
    rng = np.random.default_rng(7)
    logits = random_logits(rng, 8, 9)
    asks = [
        Ask(i % 8, SamplerParams(temperature=0.8, seed=i << 40 | i // 9), (), (0,) * (i % 9))
        for i in range(40)
    ]
    got = device_tokens(logits, asks, 9, Features(top_k=False, top_p=False, penalties=False))
    assert got == host_tokens(logits, asks, 9)


def test_what_is_broken_or_empty_gives_no_token() -> None:
    logits = np.zeros((6, 8), np.float32)
    logits[0, 3], logits[1, 4], logits[2] = np.nan, np.inf, -np.inf
    logits[3, :6] = -np.inf  # and what is left is not in the vocabulary
    logits[4, 6], logits[5, 2] = np.nan, 1.0  # neither is the NaN
    plain, greedy = SamplerParams(seed=3), SamplerParams(temperature=0.0)
    asks = [Ask(row, params) for row in range(6) for params in (plain, greedy)]
    got = device_tokens(logits, asks, 6, Features(top_k=False, top_p=False, penalties=False))
    assert got[:8] == [-1] * 8
    assert min(got[8:]) >= 0
    assert got == host_tokens(logits, asks, 6)


def test_samples_of_the_host_are_left_to_it() -> None:
    logits = np.zeros((1, 5), np.float32)
    asks = [Ask(-1, SamplerParams()), Ask(0, SamplerParams(temperature=0.0))]
    assert device_tokens(logits, asks, 5, Features(False, False, False, False)) == [-1, 0]


def test_penalties_that_leave_nothing() -> None:
    logits = np.full((1, 3), 3e38, np.float32)
    broken = SamplerParams(repetition_penalty=0.5, temperature=0.0)
    fine = SamplerParams(repetition_penalty=2.0, temperature=0.0)
    asks = [Ask(0, broken, (2,)), Ask(0, fine, (0,)), Ask(0, fine, (0, 1, 9, -1), (1,))]
    assert device_tokens(logits, asks, 3, Features(noise=False)) == [-1, 1, 2]


def test_counts_are_clean_when_a_step_is_over() -> None:
    rng = np.random.default_rng(8)
    logits = torch.tensor(random_logits(rng, 2, 9))
    params = SamplerParams(temperature=0.0, frequency_penalty=0.7, repetition_penalty=1.4)
    asks = [Ask(row, params, tuple(range(4)), (1, 1, 5) * 100) for row in (0, 1, 1)]
    room = sampler_workspace(3, 9, torch.get_default_device(), piece=64)
    out = torch.empty(3, dtype=torch.int32)
    for _ in range(2):
        sample(logits, columns(asks), 9, out, room, Features(noise=False))
        assert not room.counts.any()
        assert out.tolist() == host_tokens(logits.cpu().numpy(), asks, 9)


def test_bfloat16_logits_are_taken_as_they_are() -> None:
    narrow = torch.randn(2, 40).to(torch.bfloat16)
    params = SamplerParams(top_p=0.7, seed=5)
    asks = [Ask(row, params) for row in (0, 1)]
    room = sampler_workspace(2, 40, torch.get_default_device(), piece=64)
    out = torch.empty(2, dtype=torch.int32)
    sample(narrow, columns(asks), 40, out, room, Features(top_k=False, penalties=False))
    assert out.tolist() == host_tokens(narrow.float().cpu().numpy(), asks, 40)


def test_a_workspace_too_small_is_refused() -> None:
    room = sampler_workspace(1, 5, torch.get_default_device())
    asks = [Ask(0, SamplerParams())] * 2
    with pytest.raises(ValueError, match="2 samples of 5 ids, the workspace is for 1 of 5"):
        sample(torch.zeros(1, 5), columns(asks), 5, torch.empty(2, dtype=torch.int32), room)
