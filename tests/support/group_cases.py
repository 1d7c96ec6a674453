"""Matrices of integer groups as the kernels pack them, and their plain meaning."""

import numpy as np
from numpy.typing import NDArray

from matmul_cases import Weights, aligned_bytes
from triptych.kernels.cpu import _cpu

GROUPS = ((4, 32), (4, 64), (4, 128), (4, -1), (8, 32), (8, 64), (8, 128), (8, -1))
"""Bits, columns of a group (-1: the whole row)."""


def type_number(bits: int, group_columns: int) -> int:
    """How the kernels number a type of groups."""
    return (256 if bits == 4 else 257) + (group_columns // 32 << 16)


def random_groups(
    rng: np.random.Generator, bits: int, group: int, rows: int, columns: int
) -> Weights:
    """Any codes and zero points; scales from denormal to a hundred, of both signs, some zero."""
    size = columns if group == -1 else group
    shape = (rows, columns // size)
    low, high = (0, 16) if bits == 4 else (-128, 128)
    codes = rng.integers(low, high, (rows, columns))
    zeros = rng.integers(low, high + 1, shape)  # GPTQ's first format reaches one more
    scales = rng.standard_normal(shape) * 10.0 ** rng.integers(-8, 2, shape)
    scales[rng.random(shape) < 0.1] = 0.0
    halves = scales.astype(np.float16)
    packed = pack_groups(bits, size, codes, halves, zeros)
    exact = np.repeat(halves, size, 1).astype(np.float64) * (codes - np.repeat(zeros, size, 1))
    values = exact.astype(np.float32)
    assert np.array_equal(values.astype(np.float64), exact)
    return Weights(f"int{bits}/{group}", packed, values)


def pack_groups(
    bits: int,
    size: int,
    codes: NDArray[np.int64],
    scales: NDArray[np.float16],
    zeros: NDArray[np.int64],
) -> tuple[int, int, int, NDArray[np.uint8]]:
    """Pack codes [rows, columns] with scales and zero points [rows, groups]."""
    number = type_number(bits, size)
    rows, columns = codes.shape
    destination = aligned_bytes(_cpu.packed_bytes(number, rows, columns))
    destination[:] = 0xA5  # what is not written would show
    _cpu.pack_groups_into(
        number,
        codes.astype(np.int8).view(np.uint8),
        scales.view(np.uint16),
        zeros.astype(np.float16).view(np.uint16),
        destination,
    )
    return number, rows, columns, destination
