"""Products with groups of integers: the scalar bits everywhere, near float64, exact unpacking."""

import numpy as np
import pytest
from numpy.typing import NDArray

from group_cases import GROUPS, pack_groups, random_groups, type_number
from matmul_cases import Weights, aligned_bytes, random_activations
from sampler_cases import using_isa
from triptych.kernels import cpu
from triptych.kernels.cpu import _cpu

VECTOR_ISAS = tuple(isa for isa in cpu.supported_isas() if isa != "scalar")
# One row and one group; an odd count; more than one chunk of unpacked blocks, and two groups of it.
SHAPES = ((1, 128), (37, 384), (50, 512))
Matrix = NDArray[np.float32]


def bits_of(x: Matrix) -> NDArray[np.uint32]:
    return x.view(np.uint32)


def product(
    weights: Weights, x: Matrix, isa: str, rows_at_once: int = 10**6, limit: int = 32767
) -> Matrix:
    with using_isa(isa):
        return _cpu.matmul(weights.packed, x, limit, rows_at_once=rows_at_once)


@pytest.mark.parametrize(("bits", "group"), GROUPS)
def test_unpacks_to_scale_times_code_less_zero(bits: int, group: int) -> None:
    rng = np.random.default_rng(1)
    for rows, columns in SHAPES:
        weights = random_groups(rng, bits, group, rows, columns)
        assert np.array_equal(_cpu.unpack_matrix(weights.packed), weights.values)


@pytest.mark.parametrize("bits", [4, 8])
def test_every_code_in_every_place(bits: int) -> None:
    """A swapped nibble, column or row cannot hide."""
    low, count = (0, 16) if bits == 4 else (-128, 256)
    codes = low + (np.arange(48 * 256).reshape(48, 256) * 7 + np.arange(48)[:, None]) % count
    scales = np.linspace(1, 2, 48 * 4).reshape(48, 4).astype(np.float16)
    zeros = (np.arange(48 * 4).reshape(48, 4) * 5) % 16
    packed = pack_groups(bits, 64, codes, scales, zeros)
    want = np.repeat(scales, 64, 1).astype(np.float32) * (codes - np.repeat(zeros, 64, 1))
    assert np.array_equal(_cpu.unpack_matrix(packed), want)


@pytest.mark.parametrize("limit", [127, 32767])
@pytest.mark.parametrize(("bits", "group"), GROUPS)
@pytest.mark.parametrize("isa", VECTOR_ISAS)
def test_has_the_scalar_bits(bits: int, group: int, isa: str, limit: int) -> None:
    rng = np.random.default_rng(3)
    for rows, columns in SHAPES:
        weights = random_groups(rng, bits, group, rows, columns)
        x = random_activations(rng, 21, columns)
        want = product(weights, x, "scalar", limit=limit)
        assert np.isfinite(want).all()
        assert np.array_equal(bits_of(product(weights, x, isa, limit=limit)), bits_of(want))


@pytest.mark.parametrize("limit", [127, 32767])
@pytest.mark.parametrize(("bits", "group"), GROUPS)
@pytest.mark.parametrize("isa", cpu.supported_isas())
def test_a_row_does_not_depend_on_its_neighbours(
    bits: int, group: int, isa: str, limit: int
) -> None:
    rng = np.random.default_rng(4)
    weights = random_groups(rng, bits, group, 70, 512)
    x = random_activations(rng, 13, 512)
    want = bits_of(product(weights, x, isa, 1, limit))
    for rows_at_once in range(2, 14):
        got = product(weights, x, isa, rows_at_once, limit)
        assert np.array_equal(bits_of(got), want), rows_at_once
    for parts in (2, 3, 5):
        with using_isa(isa):
            got = _cpu.matmul(weights.packed, x, limit, rows_at_once=7, parts=parts)
        assert np.array_equal(bits_of(got), want), parts


@pytest.mark.parametrize(("bits", "group"), GROUPS)
def test_random_activations_lose_five_digits_only(bits: int, group: int) -> None:
    """Against float64, with scales and zero points as quantisers choose them."""
    rng = np.random.default_rng(5)
    rows, columns = 64, 768
    size = columns if group == -1 else group
    shape = (rows, columns // size)
    middle = 8 if bits == 4 else 0
    codes = (
        rng.integers(0, 16, (rows, columns))
        if bits == 4
        else rng.integers(-128, 128, (rows, columns))
    )
    scales = rng.uniform(0.001, 0.01, shape).astype(np.float16)
    zeros = middle + rng.integers(-2, 3, shape)
    packed = pack_groups(bits, size, codes, scales, zeros)
    values = np.repeat(scales, size, 1).astype(np.float64) * (codes - np.repeat(zeros, size, 1))
    x = rng.standard_normal((16, columns)).astype(np.float32)
    truth = x.astype(np.float64) @ values.T
    for isa in cpu.supported_isas():
        error = product(Weights("", packed, values.astype(np.float32)), x, isa) - truth
        assert np.linalg.norm(error) < 6e-5 * np.linalg.norm(truth)


@pytest.mark.parametrize(("bits", "group"), GROUPS)
def test_is_near_float64_at_extremes(bits: int, group: int) -> None:
    """Whatever the codes: no further off than 16-bit activations and float32 sums explain."""
    rng = np.random.default_rng(6)
    weights = random_groups(rng, bits, group, 37, 384)
    x = random_activations(rng, 8, 384)
    truth = x.astype(np.float64) @ weights.values.astype(np.float64).T
    peaks = np.abs(x).reshape(8, -1, 32).max(-1).repeat(32, -1).astype(np.float64)
    largest = np.abs(weights.values).astype(np.float64).max(1)
    # A code and its zero point may each be far larger than their difference.
    span = 2**bits * np.abs(weights.values).max()
    allowed = peaks.sum(-1, keepdims=True) * (largest / 65534 + 1e-6 * span) + 1e-36
    for isa in cpu.supported_isas():
        assert (np.abs(product(weights, x, isa) - truth) <= allowed).all()


def test_packed_size_is_near_the_codes() -> None:
    """Four bytes per row and group beside the codes, and nothing else."""
    for bits, group in GROUPS:
        size = 1024 if group == -1 else group
        want = 512 * (1024 * bits // 8 + 1024 // size * 4)
        assert _cpu.packed_bytes(type_number(bits, size), 512, 1024) == want


def test_refuses_what_does_not_fit() -> None:
    number = type_number(4, 64)
    with pytest.raises(ValueError, match="columns a multiple of 64"):
        _cpu.packed_bytes(number, 16, 96)
    for bad in (256, 257, 258 + 65536, (1 << 16) + 8, -(1 << 16) + 256):
        with pytest.raises(ValueError, match="no CPU kernels"):
            _cpu.packed_bytes(bad, 16, 64)
    destination = aligned_bytes(_cpu.packed_bytes(number, 16, 128))
    codes = np.zeros((16, 128), np.uint8)
    two, one = np.zeros((16, 2), np.uint16), np.zeros((16, 1), np.uint16)
    with pytest.raises(ValueError, match="a column for each group"):
        _cpu.pack_groups_into(number, codes, one, two, destination)
    with pytest.raises(ValueError, match="a column for each group"):
        _cpu.pack_groups_into(number, codes, two, one, destination)
    with pytest.raises(ValueError, match="not the bytes"):
        _cpu.pack_groups_into(number, codes, two, two, destination[:-64])
    with pytest.raises(ValueError, match="not a type of groups"):
        _cpu.pack_groups_into(8, codes, two, two, destination)
    with pytest.raises(ValueError, match="pack_groups_into"):
        _cpu.pack_into(number, 16, 128, codes.reshape(-1), destination)
