"""Matrix products: every instruction set gives the scalar one's bits; all are near float64."""

import numpy as np
import pytest
from numpy.typing import NDArray

from matmul_cases import (
    CODE_FORMATS,
    FORMATS,
    Weights,
    block_columns,
    random_activations,
    random_weights,
    shapes,
)
from sampler_cases import using_isa
from triptych.kernels import cpu
from triptych.kernels.cpu import _cpu

VECTOR_ISAS = tuple(isa for isa in cpu.supported_isas() if isa != "scalar")
Matrix = NDArray[np.float32]


def bits(x: Matrix) -> NDArray[np.uint32]:
    return x.view(np.uint32)


def product(weights: Weights, x: Matrix, isa: str, rows_at_once: int = 10**6) -> Matrix:
    with using_isa(isa):
        return _cpu.matmul(weights.packed, x, rows_at_once=rows_at_once)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("isa", VECTOR_ISAS)
def test_has_the_scalar_bits(name: str, isa: str) -> None:
    """Extreme scales and activations included; 21 rows fill tiles of several sizes."""
    rng = np.random.default_rng(3)
    for rows, columns in shapes(name):
        weights = random_weights(rng, name, rows, columns)
        x = random_activations(rng, 21, columns)
        want = product(weights, x, "scalar")
        assert np.isfinite(want).all()
        assert np.array_equal(bits(product(weights, x, isa)), bits(want))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("isa", cpu.supported_isas())
def test_a_row_does_not_depend_on_its_neighbours(name: str, isa: str) -> None:
    """Any number of rows a call, and any part of the panels, gives the same bits."""
    rng = np.random.default_rng(4)
    columns = 3 * 96 if block_columns(name) == 1 else 2 * max(block_columns(name), 224)
    weights = random_weights(rng, name, 70, columns)
    x = random_activations(rng, 13, columns)
    want = bits(product(weights, x, isa, rows_at_once=1))
    for rows_at_once in (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13):
        assert np.array_equal(bits(product(weights, x, isa, rows_at_once)), want), rows_at_once
    for parts in (2, 3, 5, 9):
        with using_isa(isa):
            got = _cpu.matmul(weights.packed, x, rows_at_once=7, parts=parts)
        assert np.array_equal(bits(got), want), parts


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0"])
@pytest.mark.parametrize("isa", VECTOR_ISAS)
def test_more_rows_than_one_chunk(name: str, isa: str) -> None:
    rng = np.random.default_rng(5)
    weights = random_weights(rng, name, 17, 64)
    x = random_activations(rng, 400, 64)
    assert np.array_equal(
        bits(product(weights, x, isa)), bits(product(weights, x, isa, rows_at_once=1))
    )


@pytest.mark.parametrize("name", FORMATS)
def test_is_near_float64(name: str) -> None:
    """The error is that of 16-bit activations: a 65,534th of the largest of their block."""
    rng = np.random.default_rng(6)
    for rows, columns in shapes(name):
        weights = random_weights(rng, name, rows, columns)
        x = random_activations(rng, 8, columns)
        truth = x.astype(np.float64) @ weights.values.astype(np.float64).T
        magnitude = np.abs(x).astype(np.float64) @ np.abs(weights.values).astype(np.float64).T
        allowed = 1e-6 * magnitude + 1e-36
        if name in CODE_FORMATS:
            peaks = np.abs(x).reshape(8, -1, 32).max(-1).repeat(32, -1).astype(np.float64)
            allowed += peaks / 65534 @ np.abs(weights.values).astype(np.float64).T
            # With mins, d * code and min may be far larger than their sum.
            allowed += 1e-5 * (peaks @ np.ones((columns, rows))) * np.abs(weights.values).max()
        for isa in cpu.supported_isas():
            assert (np.abs(product(weights, x, isa) - truth) <= allowed).all()


@pytest.mark.parametrize("name", CODE_FORMATS)
def test_random_activations_lose_five_digits_only(name: str) -> None:
    """What makes 16-bit activations as good as float32's: a relative error of a few 1e-5."""
    rng = np.random.default_rng(7)
    columns = 768
    weights = random_weights(rng, name, 64, columns)
    x = rng.standard_normal((16, columns)).astype(np.float32)
    truth = x.astype(np.float64) @ weights.values.astype(np.float64).T
    error = product(weights, x, cpu.active_isa()) - truth
    assert np.linalg.norm(error) < 6e-5 * np.linalg.norm(truth)


@pytest.mark.parametrize("isa", cpu.supported_isas())
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q6_K", "BF16"])
def test_adds_to_what_is_there(name: str, isa: str) -> None:
    rng = np.random.default_rng(8)
    weights = random_weights(rng, name, 37, 256)
    for rows in (1, 3, 8, 17):
        x = random_activations(rng, rows, 256)
        initial = rng.standard_normal((rows, 37)).astype(np.float32)
        with using_isa(isa):
            got = _cpu.matmul(weights.packed, x, initial=initial)
        assert np.array_equal(bits(got), bits(initial + product(weights, x, isa)))


@pytest.mark.parametrize("isa", cpu.supported_isas())
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_not_hidden(name: str, isa: str, poison: float) -> None:
    """They spoil their own row, and no other."""
    rng = np.random.default_rng(9)
    weights = random_weights(rng, name, 20, 256)
    x = rng.standard_normal((6, 256)).astype(np.float32)
    clean = product(weights, x, isa)
    x[2, 77] = poison
    got = product(weights, x, isa)
    assert not np.isfinite(got[2]).any()
    rest = [0, 1, 3, 4, 5]
    assert np.array_equal(bits(got[rest]), bits(clean[rest]))


@pytest.mark.parametrize("limit", [127, 32767])
@pytest.mark.parametrize("isa", cpu.supported_isas())
def test_quantises_rows(limit: int, isa: str) -> None:
    x = random_activations(np.random.default_rng(10), 40, 96)
    x[0, :32] = np.float32(1e37)  # more, and the sum overflows
    x[1, :32] = np.float32(1e-31)  # below the smallest peak
    x[2, :32] = np.arange(-16, 16) + np.float32(0.5)  # halves round to even
    with using_isa(isa):
        codes, scales, sums, code_sums = _cpu.quantize_rows(x, limit)
    blocks = x.reshape(40, 3, 32)
    peaks = np.abs(blocks).max(-1)
    peaks[peaks < 2.0**-100] = 0
    assert np.array_equal(scales, peaks / np.float32(limit))
    inverse = np.divide(np.float32(limit), peaks, out=np.zeros_like(peaks), where=peaks > 0)
    want = np.rint(blocks * inverse[..., None]).astype(np.int16).reshape(40, 96)
    assert np.array_equal(codes, want)
    assert np.abs(codes).max() == limit
    assert np.array_equal(code_sums, want.reshape(40, 3, 32).sum(-1, dtype=np.int32))
    assert np.array_equal(sums, scales * code_sums.astype(np.float32))


def test_refuses_activations_of_another_shape_or_type() -> None:
    weights = random_weights(np.random.default_rng(11), "Q8_0", 16, 64)
    with pytest.raises(ValueError, match="x has 32 columns, the matrix 64"):
        _cpu.matmul(weights.packed, np.zeros((1, 32), np.float32))
    with pytest.raises(TypeError, match="x must have dtype float32"):
        _cpu.matmul(weights.packed, np.zeros((1, 64)))  # type: ignore[arg-type]  # float64: the point
    with pytest.raises(ValueError, match="activation_limit is not within 1 and 32767"):
        _cpu.matmul(weights.packed, np.zeros((1, 64), np.float32), activation_limit=32768)
