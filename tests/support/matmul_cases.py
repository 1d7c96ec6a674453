"""Weight matrices in every format that the matmul kernels read, and their plain meaning."""

from collections.abc import Iterator
from dataclasses import dataclass

import gguf
import numpy as np
from numpy.typing import NDArray

from triptych.kernels.cpu import _cpu

FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "F32", "F16", "BF16")
CODE_FORMATS = FORMATS[:8]

# Where in a block of raw bytes the f16 scales lie; all else may hold any byte.
HALF_FIELDS = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip


@dataclass(frozen=True)
class Weights:
    """A packed matrix as the C++ module takes it, and its values [rows, columns] in float32."""

    name: str
    packed: tuple[int, int, int, NDArray[np.uint8]]
    values: NDArray[np.float32]


def block_columns(name: str) -> int:
    """How many columns share scales in a file: rows are multiples of it."""
    return int(gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][0])


def aligned_bytes(size: int, alignment: int = 64) -> NDArray[np.uint8]:
    """Uninitialised bytes at an address that packed matrices may have."""
    raw = np.empty(size + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + size]


def pack(name: str, rows: int, columns: int, source: NDArray[np.uint8]) -> Weights:
    """Pack `source`, the matrix's bytes in a GGUF file."""
    kind = gguf.GGMLQuantizationType[name]
    packed = aligned_bytes(_cpu.packed_bytes(int(kind), rows, columns))
    packed[:] = 0xA5  # what is not written would show
    _cpu.pack_into(int(kind), rows, columns, source, packed)
    values = gguf.dequantize(source.reshape(rows, -1), kind).astype(np.float32)
    return Weights(name, (int(kind), rows, columns, packed), values.reshape(rows, columns))


def random_bytes(rng: np.random.Generator, name: str, rows: int, columns: int) -> NDArray[np.uint8]:
    """Any bytes that make finite weights: scales from denormal to a hundred, of both signs."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    if name not in HALF_FIELDS:
        weights = rng.standard_normal((rows, columns)) * 10.0 ** rng.integers(-6, 3, (rows, 1))
        if name == "BF16":
            bits = weights.astype(np.float32).view(np.uint32)
            return (bits >> 16).astype(np.uint16).reshape(-1).view(np.uint8)
        return (
            weights.astype(np.float32 if name == "F32" else np.float16).reshape(-1).view(np.uint8)
        )
    blocks = rng.integers(0, 256, (rows * columns // block, size), np.uint8)
    for field in HALF_FIELDS[name]:
        scales = rng.standard_normal(len(blocks)) * 10.0 ** rng.integers(-8, 2, len(blocks))
        blocks[:, field : field + 2] = scales.astype(np.float16).reshape(-1, 1).view(np.uint8)
    blocks[:: max(len(blocks) // 7, 1)] = 0
    return blocks.reshape(-1)


def random_weights(rng: np.random.Generator, name: str, rows: int, columns: int) -> Weights:
    """Weights of random bytes; some blocks are all zero."""
    return pack(name, rows, columns, random_bytes(rng, name, rows, columns))


def shapes(name: str) -> Iterator[tuple[int, int]]:
    """Rows and columns: one row, an odd count, whole panels and more; one block and several."""
    block = block_columns(name)
    yield from ((1, block), (16, 2 * block), (37, 3 * block))
    if block == 1:
        yield from ((5, 7), (33, 45))
    else:
        yield (50, (448 // block + 1) * block)  # more than one chunk of unpacked blocks


def random_activations(rng: np.random.Generator, rows: int, columns: int) -> NDArray[np.float32]:
    """Rows from tiny to huge, with zeros of both signs, denormals and outliers among them."""
    x = rng.standard_normal((rows, columns)) * 10.0 ** rng.integers(-12, 9, (rows, 1))
    x[rng.random((rows, columns)) < 0.1] = -0.0
    x[rng.random((rows, columns)) < 0.01] *= 1000
    x[rng.random((rows, columns)) < 0.01] = 1e-40
    x[rng.random(rows) < 0.1] = 0.0
    return np.ascontiguousarray(x, np.float32)
