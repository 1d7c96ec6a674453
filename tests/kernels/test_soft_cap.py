"""Soft caps, cap * tanh(x / cap): values and bits, alone and inside attention."""

import numpy as np
import pytest
from numpy.typing import NDArray

from sampler_cases import using_isa
from triptych.kernels import cpu

Floats = NDArray[np.float32]


def in_every_isa(x: Floats, cap: float) -> Floats:
    """The capped values, after all instruction sets have given the same bits (of what is a number:
    the sign of NaN means nothing)."""
    made = []
    for isa in cpu.supported_isas():
        with using_isa(isa):
            made.append(cpu.soft_cap(x, cap))
    bits = [np.where(np.isnan(each), np.float32(np.nan), each).view(np.uint32) for each in made]
    for other in bits[1:]:
        np.testing.assert_array_equal(other, bits[0])
    return made[0]


@pytest.mark.parametrize("cap", [1.0, 30.0, 50.0, 0.37])
def test_near_float64(cap: float) -> None:
    rng = np.random.default_rng()
    spread = rng.standard_normal(4001) * np.exp(rng.uniform(-60, 5, 4001))
    x = np.concatenate([spread * cap, rng.uniform(-9 * cap, 9 * cap, 20011)]).astype(np.float32)
    expected = cap * np.tanh(x.astype(np.float64) / cap)
    got = in_every_isa(x, cap)
    # Bounded relative to the value, so that small scores keep their precision.
    np.testing.assert_allclose(got, expected, rtol=6e-7, atol=0)
    assert np.abs(got).max() <= np.float32(cap)


def test_borders() -> None:
    inf, tiny = np.float32(np.inf), np.float32(1e-45)
    largest = np.finfo(np.float32).max
    x = np.array([0, -0.0, inf, -inf, largest, -largest, tiny, -tiny], np.float32)
    got = in_every_isa(x, 50.0)
    np.testing.assert_array_equal(got[:6], np.array([0, 0, 50, -50, 50, -50], np.float32))
    assert np.abs(got[6:]).max() <= 1e-44
    nan = in_every_isa(np.array([np.nan, 1, 2], np.float32), 50.0)
    assert np.isnan(nan[0])
    assert np.isfinite(nan[1:]).all()


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_attention_against_float64(dtype: str) -> None:
    """Scores well beyond the cap, over several chunks and two partitions."""
    rng = np.random.default_rng()
    length, queries, heads, size, cap = 700, 37, 4, 32, 5.0
    keys, values = (rng.standard_normal((length, 2, size)).astype(np.float32) for _ in range(2))
    q = 3 * rng.standard_normal((queries, heads, size)).astype(np.float32)
    cache = cpu.KvCache(length // 16 + 1, 16, 2, size, dtype)
    cache.store(np.arange(length, dtype=np.int32), keys, values)
    table = np.arange(length // 16 + 1, dtype=np.int32)[None]
    starts, lengths = np.array([0, queries], np.int32), np.array([length], np.int32)

    def attend(soft_cap: float) -> Floats:
        return cache.attend(q, table, starts, lengths, None, 1, soft_cap)

    expected = np.empty(q.shape)
    for i in range(queries):
        seen = length - queries + i + 1
        for head in range(heads):
            k, v = (each[:seen, head // 2].astype(np.float64) for each in (keys, values))
            scores = cap * np.tanh(k @ q[i, head].astype(np.float64) / cap)
            weights = np.exp(scores - scores.max())
            expected[i, head] = weights @ v / weights.sum()
    allowed = 1e-5 if dtype == "float32" else 3e-2
    np.testing.assert_allclose(attend(cap), expected, atol=allowed)
    assert np.abs(attend(0.0) - expected).max() > 10 * allowed
    # A cap far above all scores changes next to nothing.
    np.testing.assert_allclose(attend(1e5), attend(0.0), atol=1e-4)
