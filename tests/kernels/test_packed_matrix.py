"""Packing weight matrices: what goes in comes out, bit for bit, for every format."""

import gguf
import numpy as np
import pytest

from matmul_cases import (
    CODE_FORMATS,
    FORMATS,
    aligned_bytes,
    block_columns,
    pack,
    random_weights,
    shapes,
)
from triptych.kernels.cpu import _cpu


@pytest.mark.parametrize("name", FORMATS)
def test_unpacks_to_what_gguf_dequantises(name: str) -> None:
    rng = np.random.default_rng(1)
    for rows, columns in shapes(name):
        weights = random_weights(rng, name, rows, columns)
        got = _cpu.unpack_matrix(weights.packed)
        assert got.shape == (rows, columns)
        assert np.array_equal(got.view(np.uint32), weights.values.view(np.uint32))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_a_quantised_matrix_comes_back(name: str) -> None:
    """The values that gguf's own quantiser made, extremes of a block among them."""
    x = np.random.default_rng(2).standard_normal((19, 96)).astype(np.float32)
    source = gguf.quantize(x, gguf.GGMLQuantizationType[name]).reshape(-1)
    weights = pack(name, 19, 96, source)
    assert np.array_equal(_cpu.unpack_matrix(weights.packed), weights.values)
    assert np.abs(weights.values - x).max() < 0.5


@pytest.mark.parametrize("name", CODE_FORMATS)
def test_every_code_in_every_place(name: str) -> None:
    """All bytes of the codes from 0 to 255, so that a swapped bit or column cannot hide."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    source = np.arange(256 * size * 3, dtype=np.uint64).astype(np.uint8).reshape(-1, size)
    source[:, :4] = np.frombuffer(np.array([1.5, -0.25], np.float16).tobytes(), np.uint8)
    source[:, -2:] = np.frombuffer(np.float16(0.75).tobytes(), np.uint8)
    weights = pack(name, 256, 3 * block, source.reshape(-1))
    assert np.array_equal(_cpu.unpack_matrix(weights.packed), weights.values)


def test_packed_size_is_near_the_file_size() -> None:
    """Peak memory at load depends on it. Q6_K is widened to 8-bit codes."""
    for name in FORMATS:
        kind = gguf.GGMLQuantizationType[name]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        limit = 1.35 if name == "Q6_K" else 1.03
        assert _cpu.packed_bytes(int(kind), 1536, 768) <= limit * 1536 * 768 * size / block


@pytest.mark.parametrize("name", FORMATS)
def test_refuses_a_shape_that_the_format_cannot_have(name: str) -> None:
    kind = int(gguf.GGMLQuantizationType[name])
    block = block_columns(name)
    for rows, columns in ((0, block), (-1, block), (4, 0), (4, -block)):
        with pytest.raises(ValueError, match="must be positive"):
            _cpu.packed_bytes(kind, rows, columns)
    if block > 1:
        with pytest.raises(ValueError, match=f"columns a multiple of {block}"):
            _cpu.packed_bytes(kind, 4, block + 16)


@pytest.mark.parametrize("ggml_type", [-1, 9, 10, 11, 15, 16, 29, 1000])
def test_refuses_a_type_without_kernels(ggml_type: int) -> None:
    with pytest.raises(ValueError, match=f"no CPU kernels for GGML type {ggml_type}"):
        _cpu.packed_bytes(ggml_type, 16, 256)


def test_refuses_bytes_of_another_size_or_alignment() -> None:
    kind = int(gguf.GGMLQuantizationType.Q8_0)
    destination = aligned_bytes(_cpu.packed_bytes(kind, 16, 32))
    with pytest.raises(ValueError, match="source has 1 entries"):
        _cpu.pack_into(kind, 16, 32, np.zeros(1, np.uint8), destination)
    with pytest.raises(ValueError, match="matrix has 1 entries"):
        _cpu.unpack_matrix((kind, 16, 32, np.zeros(1, np.uint8)))
    shifted = aligned_bytes(destination.size + 1)[1:]
    with pytest.raises(ValueError, match="not aligned to 64"):
        _cpu.unpack_matrix((kind, 16, 32, shifted))
