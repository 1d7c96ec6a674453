"""The plan's elementwise kernels: near float64, and the same bits on every instruction set."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from sampler_cases import using_isa
from triptych.kernels import cpu

Floats = NDArray[np.float32]
SIZES = (1, 2, 15, 16, 17, 31, 33, 48, 576, 1000)


def inputs(size: int, seed: int) -> Floats:
    """Ordinary numbers with extremes, denormals and both zeros among them."""
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(size) * 10.0 ** rng.integers(-3, 3, size)).astype(np.float32)
    odd = np.array([0.0, -0.0, 1e-42, -1e-42, 1e15, -1e15, 88.0, -104.0], np.float32)
    places = rng.integers(0, size, min(size // 4, len(odd)))
    values[places] = odd[: len(places)]
    return values


def same_on_all(run: Callable[[], Floats]) -> Floats:
    """Run on every instruction set; the bits must be one. Returns them."""
    results = []
    for isa in cpu.supported_isas():
        with using_isa(isa):
            results.append(run())
    for result in results[1:]:
        np.testing.assert_array_equal(result.view(np.uint32), results[0].view(np.uint32))
    return results[0]


@pytest.mark.parametrize("size", SIZES)
def test_rms_norm(size: int) -> None:
    x = np.stack([inputs(size, seed) for seed in range(3)])
    weight = inputs(size, 9)
    got = same_on_all(lambda: cpu.rms_norm(x, weight, 1e-5))
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-35)


def test_rms_norm_of_zeros_and_of_nan() -> None:
    x = np.zeros((3, 33), np.float32)
    x[1, 7] = np.nan
    x[2, 8] = np.inf
    got = same_on_all(lambda: cpu.rms_norm(x, np.ones(33, np.float32), 1e-5))
    assert not got[0].any()
    assert np.isnan(got[1]).all()
    assert np.isnan(got[2, 8])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate(activation: str, size: int) -> None:
    gate, up = inputs(size, 1), inputs(size, 2)
    got = same_on_all(lambda: cpu.gate(activation, gate, up))
    x = gate.astype(np.float64)
    with np.errstate(over="ignore", under="ignore"):
        inner = x if activation == "silu" else 2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
        expected = x / (1 + np.exp(-inner)) * up
    # The exponential ends at e^88: 1e15 below zero still leaves 1e-22.
    np.testing.assert_allclose(got, expected, rtol=3e-5, atol=1e-15)


def test_gate_keeps_nan() -> None:
    gate = np.array([np.nan, 1.0, 0.0], np.float32)
    up = np.array([1.0, np.nan, 2.0], np.float32)
    got = same_on_all(lambda: cpu.gate("silu", gate, up))
    assert np.isnan(got).tolist() == [True, True, False]


def test_the_exponential_all_over_its_range() -> None:
    """silu(x) = x / (1 + e^-x) shows e^-x where it is large."""
    x = -np.linspace(0.001, 86.0, 20001, dtype=np.float32)
    got = same_on_all(lambda: cpu.gate("silu", x, np.ones_like(x)))
    wide = x.astype(np.float64)
    np.testing.assert_allclose(got, wide / (1 + np.exp(-wide)), rtol=4e-7)


@pytest.mark.parametrize("head_dim", [2, 8, 30, 32, 34, 64, 80, 128])
def test_rotate(head_dim: int) -> None:
    rng = np.random.default_rng(head_dim)
    x = rng.standard_normal((3, 5, head_dim)).astype(np.float32)
    angles = rng.uniform(-9, 9, (3, head_dim // 2))
    cosines, sines = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    got = same_on_all(lambda: cpu.rotate(x, cosines, sines, 0.25))
    first, second = np.split(x.astype(np.float64), 2, axis=2)
    c, s = np.cos(angles)[:, None], np.sin(angles)[:, None]
    expected = 0.25 * np.concatenate((first * c - second * s, second * c + first * s), axis=2)
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_bad_arguments_are_refused() -> None:
    ones = np.ones((1, 4), np.float32)
    with pytest.raises(TypeError, match="weight must have dtype float32"):
        cpu.rms_norm(ones, np.ones(4), 1e-5)  # type: ignore[arg-type]  # the point of the test
    with pytest.raises(ValueError, match="weight has 3 entries, expected 4"):
        cpu.rms_norm(ones, np.ones(3, np.float32), 1e-5)
    with pytest.raises(ValueError, match="activation 'tanh' is not"):
        cpu.gate("tanh", ones[0], ones[0])
