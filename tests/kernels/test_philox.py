"""Philox4x32-10 against Random123's known answers, and the noise that is made of it."""

import numpy as np
import pytest

from triptych.kernels.cpu import _cpu
from triptych.kernels.reference.philox import gumbel, philox4x32, uniform

# Random123, kat_vectors, "philox4x32 10": counter, key, answer.
KNOWN_ANSWERS = [
    (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], answer: tuple[int, ...]
) -> None:
    assert tuple(_cpu.philox4x32(counter, *key)) == answer
    assert tuple(philox4x32(np.array(counter, np.uint32), key).tolist()) == answer


def test_both_agree_on_random_counters() -> None:
    rng = np.random.default_rng(3)
    counters = rng.integers(0, 2**32, (200, 4), np.uint32)
    key = 0x01234567, 0x89ABCDEF
    assert philox4x32(counters, key).tolist() == [
        _cpu.philox4x32(counter, *key) for counter in counters.tolist()
    ]


def test_the_layout_is_as_documented() -> None:
    """docs/sampling.md: counter (id // 4, part, choice, position), key seed, word id % 4."""
    seed, choice, position, token = 0x1122334455667788, 3, 17, 4 * 1000 + 2
    key = 0x55667788, 0x11223344
    high = _cpu.philox4x32((1000, 0, choice, position), *key)[2]
    low = _cpu.philox4x32((1000, 1, choice, position), *key)[2]
    odd = 2 * (high << 20 | low >> 12) + 1
    assert uniform(np.array([token]), seed, choice, position)[0] == odd * 2.0**-53


def test_uniform_is_inside_the_open_interval_and_even() -> None:
    values = uniform(np.arange(1 << 16), 7, 0, 0)
    assert values.min() > 0
    assert values.max() < 1
    counts = np.bincount((values * 64).astype(np.int64), minlength=64)
    assert abs(counts - 1024).max() < 5 * 32  # five standard deviations


def test_gumbel_has_the_moments_of_its_law() -> None:
    noise = gumbel(np.arange(1 << 16), 7, 0, 0)
    assert noise.mean() == pytest.approx(0.5772, abs=0.03)
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=0.06)


def test_every_part_of_the_key_changes_the_noise() -> None:
    ids = np.arange(64)
    keys = [(1, 0, 0), (1 << 32, 0, 0), (1, 1, 0), (1, 0, 1), (1, 1, 1)]
    rows = np.stack([uniform(ids, *key) for key in keys])
    assert len(np.unique(rows)) == rows.size
    assert (
        abs(
            np.corrcoef(np.stack([uniform(np.arange(4096), *key) for key in keys]))
            - np.eye(len(keys))
        ).max()
        < 0.08
    )
