"""Products with activations in bytes: every instruction set and tile gives the scalar bits."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from group_cases import random_groups
from matmul_cases import (
    CODE_FORMATS,
    FORMATS,
    HALF_FIELDS,
    Weights,
    block_columns,
    pack,
    random_activations,
    random_bytes,
    random_weights,
    shapes,
)
from sampler_cases import using_isa
from triptych.kernels import cpu
from triptych.kernels.cpu import _cpu

VECTOR_ISAS = tuple(isa for isa in cpu.supported_isas() if isa != "scalar")
FLOAT_FORMATS = FORMATS[len(CODE_FORMATS) :]
Matrix = NDArray[np.float32]


def bits(x: Matrix) -> NDArray[np.uint32]:
    return x.view(np.uint32)


def product(
    weights: Weights, x: Matrix, isa: str, rows_at_once: int = 10**6, limit: int = 127
) -> Matrix:
    with using_isa(isa):
        return _cpu.matmul(weights.packed, x, limit, rows_at_once=rows_at_once)


@pytest.mark.parametrize("limit", [1, 90, 127])
@pytest.mark.parametrize("name", CODE_FORMATS)
@pytest.mark.parametrize("isa", VECTOR_ISAS)
def test_has_the_scalar_bits(name: str, isa: str, limit: int) -> None:
    """21 rows fill tiles of several sizes; the last shape is more than one chunk of blocks."""
    rng = np.random.default_rng(3)
    for rows, columns in (*shapes(name), (33, 1024)):
        weights = random_weights(rng, name, rows, columns)
        x = random_activations(rng, 21, columns)
        want = product(weights, x, "scalar", limit=limit)
        assert np.isfinite(want).all()
        assert np.array_equal(bits(product(weights, x, isa, limit=limit)), bits(want))


def extreme_codes(name: str, rows: int, columns: int, high: bool) -> Weights:
    """Weights whose codes are all the largest, or all zero bits: sums as large as they get."""
    source = random_bytes(np.random.default_rng(0), name, rows, columns)
    blocks = source.reshape(rows * columns // block_columns(name), -1)
    zero, one = (0x80, 0x7F) if name == "Q8_0" else (0x00, 0xFF)  # -128 and 127 in one byte
    blocks[:] = one if high else zero
    for field in HALF_FIELDS[name]:
        blocks[:, field : field + 2] = np.array([0.5 + field], np.float16).view(np.uint8)
    return pack(name, rows, columns, source)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("high", [True, False])
@pytest.mark.parametrize("name", CODE_FORMATS)
def test_nothing_saturates(name: str, high: bool, sign: float) -> None:
    """Every code and every activation code at its largest: what 16-bit sums would not hold."""
    columns = 2 * max(block_columns(name), 32)
    weights = extreme_codes(name, 20, columns, high)
    x = np.full((9, columns), sign, np.float32)
    truth = x.astype(np.float64) @ weights.values.astype(np.float64).T
    magnitude = np.abs(x).astype(np.float64) @ np.abs(weights.values).astype(np.float64).T
    for isa in cpu.supported_isas():
        got = product(weights, x, isa)
        assert np.array_equal(bits(got), bits(product(weights, x, "scalar"))), isa
        # A block of ones is rounded exactly; mins and codes may cancel.
        assert (np.abs(got - truth) <= 1e-4 * magnitude + 1e-3).all(), isa


@pytest.mark.parametrize("name", CODE_FORMATS)
@pytest.mark.parametrize("isa", cpu.supported_isas())
def test_a_row_does_not_depend_on_its_neighbours(name: str, isa: str) -> None:
    """Any number of rows a call, and any part of the panels, gives the same bits."""
    rng = np.random.default_rng(4)
    columns = 2 * max(block_columns(name), 480)
    columns -= columns % block_columns(name)
    weights = random_weights(rng, name, 70, columns)
    x = random_activations(rng, 14, columns)
    want = bits(product(weights, x, isa, rows_at_once=1))
    for rows_at_once in range(2, 15):
        assert np.array_equal(bits(product(weights, x, isa, rows_at_once)), want), rows_at_once
    for parts in (2, 3, 5, 9):
        with using_isa(isa):
            got = _cpu.matmul(weights.packed, x, 127, rows_at_once=7, parts=parts)
        assert np.array_equal(bits(got), want), parts


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(CODE_FORMATS),
    isa=st.sampled_from(cpu.supported_isas()),
    rows=st.integers(1, 40),
    blocks=st.integers(1, 30),
    batch=st.integers(1, 20),
    cut=st.integers(1, 20),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_any_shape_and_any_floats(
    name: str,
    isa: str,
    rows: int,
    blocks: int,
    batch: int,
    cut: int,
    seed: int,
    data: st.DataObject,
) -> None:
    """Odd sizes, denormals, blocks of zeros, NaN and infinity: the scalar bits, row by row."""
    rng = np.random.default_rng(seed)
    block = block_columns(name)
    columns = (blocks * 32 + block - 1) // block * block
    weights = random_weights(rng, name, rows, columns)
    x = random_activations(rng, batch, columns)
    poison = st.sampled_from([0.0, -0.0, 1e-45, -1e-40, 2.0**-100, 1e30, np.nan, np.inf, -np.inf])
    for row in range(batch):
        if data.draw(st.booleans()):
            at = data.draw(st.integers(0, columns // 32 - 1)) * 32
            x[row, at : at + data.draw(st.integers(1, 32))] = data.draw(poison)
    want = product(weights, x, "scalar")
    got = product(weights, x, isa, rows_at_once=cut)
    finite = np.isfinite(x).all(axis=1)
    assert np.isnan(got[~finite]).all()
    assert np.array_equal(bits(got[finite]), bits(want[finite]))


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits_of_code", [4, 8])
@pytest.mark.parametrize("isa", VECTOR_ISAS)
def test_groups_have_the_scalar_bits(bits_of_code: int, group: int, isa: str) -> None:
    rng = np.random.default_rng(5)
    groups = random_groups(rng, bits_of_code, group, 37, 3 * 128)
    x = random_activations(rng, 11, 3 * 128)
    for rows_at_once in (1, 4, 8, 11):
        with using_isa("scalar"):
            want = _cpu.matmul(groups.packed, x, 127)
        with using_isa(isa):
            got = _cpu.matmul(groups.packed, x, 127, rows_at_once=rows_at_once)
        assert np.array_equal(bits(got), bits(want)), rows_at_once


@pytest.mark.parametrize("isa", VECTOR_ISAS)
def test_more_rows_than_one_chunk(isa: str) -> None:
    rng = np.random.default_rng(5)
    weights = random_weights(rng, "Q4_1", 17, 64)
    x = random_activations(rng, 600, 64)
    assert np.array_equal(
        bits(product(weights, x, isa)), bits(product(weights, x, isa, rows_at_once=1))
    )


@pytest.mark.parametrize("name", CODE_FORMATS)
def test_error_is_that_of_rounding_to_bytes(name: str) -> None:
    """Of random activations: a relative error of half a percent, and far more than 16 bits' one."""
    rng = np.random.default_rng(7)
    weights = random_weights(rng, name, 64, 768)
    x = rng.standard_normal((16, 768)).astype(np.float32)
    truth = x.astype(np.float64) @ weights.values.astype(np.float64).T
    error = np.linalg.norm(product(weights, x, cpu.active_isa()) - truth) / np.linalg.norm(truth)
    assert 1e-4 < error < 1.5e-2


@pytest.mark.parametrize("isa", cpu.supported_isas())
@pytest.mark.parametrize("name", ["Q4_1", "Q5_0", "Q8_0", "Q6_K"])
def test_adds_to_what_is_there(name: str, isa: str) -> None:
    rng = np.random.default_rng(8)
    weights = random_weights(rng, name, 37, 256)
    for rows in (1, 3, 8, 17):
        x = random_activations(rng, rows, 256)
        initial = rng.standard_normal((rows, 37)).astype(np.float32)
        with using_isa(isa):
            got = _cpu.matmul(weights.packed, x, 127, initial=initial)
        assert np.array_equal(bits(got), bits(initial + product(weights, x, isa)))


@pytest.mark.parametrize("name", FLOAT_FORMATS)
@pytest.mark.parametrize("isa", cpu.supported_isas())
def test_float_weights_take_floats(name: str, isa: str) -> None:
    """Whatever the limit: there are no codes."""
    rng = np.random.default_rng(9)
    weights = random_weights(rng, name, 33, 45)
    x = random_activations(rng, 5, 45)
    assert np.array_equal(
        bits(product(weights, x, isa)), bits(product(weights, x, isa, limit=32767))
    )
