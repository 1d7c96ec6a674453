"""rotary_store against its reference, bit for bit where nothing is rounded differently."""

import pytest
import torch

from triptych.kernels.ops import ROTARY
from triptych.kernels.reference import rotary_store as plain
from triptych.kernels.reference.kv_codes import kv_values
from triptych.kernels.triton.rotary_store import rotary_store

torch.set_num_threads(1)

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
INT8, FP8 = torch.int8, torch.float8_e4m3fn
Scales = tuple[torch.Tensor, torch.Tensor] | None
BLOCKS, POSITIONS = 3, 40


def angles(head_dim: int) -> torch.Tensor:
    radians = torch.rand(POSITIONS, head_dim // 2) * 6
    return torch.cat((radians.cos(), radians.sin()), dim=1)


def caches(
    block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, Scales]:
    """Whose numbers are all 3, so that what is not to be written shows."""
    full = (BLOCKS, block_size, kv_heads, head_dim)
    k, v = (torch.full(full, 3.0).to(dtype) for _ in range(2))
    coded = dtype in (INT8, FP8)
    return k, v, (torch.full(full[:3], 3.0), torch.full(full[:3], 3.0)) if coded else None


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [(5, 2, 64, 16), (3, 1, 80, 4), (9, 9, 6, 16), (16, 1, 128, 32)],
)
@pytest.mark.parametrize(
    ("dtype", "cache"),
    [(F32, F32), (BF16, BF16), (F16, F16), (BF16, F32), (F32, INT8), (BF16, INT8), (F32, FP8),
     (BF16, FP8)],
)  # fmt: skip
def test_as_the_reference(
    heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype,
    cache: torch.dtype,
) -> None:  # fmt: skip
    tokens = 5
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim).to(dtype)
    positions = torch.randint(0, POSITIONS, (tokens,), dtype=torch.int32)
    slots = torch.randperm(BLOCKS * block_size)[:tokens].to(torch.int32)
    slots[1], positions[1], qkv[1] = -1, 2**30, torch.nan  # padding: not even looked at
    cos_sin = angles(head_dim)

    expected_qkv, result_qkv = qkv.clone(), qkv.clone()
    expected = caches(block_size, kv_heads, head_dim, cache)
    result = caches(block_size, kv_heads, head_dim, cache)
    plain.rotary_store(expected_qkv, positions, cos_sin, slots, *expected[:2], heads, expected[2])
    rotary_store(result_qkv, positions, cos_sin, slots, *result[:2], heads, result[2])

    width = heads * head_dim
    bound = ROTARY.tolerance("float32" if dtype == F32 else "bfloat16")
    torch.testing.assert_close(
        result_qkv[:, :width].float(), expected_qkv[:, :width].float(), equal_nan=True,
        rtol=bound.relative, atol=bound.absolute,
    )  # fmt: skip
    assert torch.equal(result_qkv[:, width:].nan_to_num(), qkv[:, width:].nan_to_num())
    assert torch.equal(result[1].view(torch.uint8), expected[1].view(torch.uint8))
    if result[2] is not None and expected[2] is not None:
        assert torch.equal(result[2][1], expected[2][1])
        # A key that was rounded otherwise in the last bit may have the code beside.
        step = 1 if cache == INT8 else 32
        difference = (result[0].float() - expected[0].float()).abs()
        assert (difference <= step).all()
        assert (difference != 0).float().mean() < 0.01
        torch.testing.assert_close(result[2][0], expected[2][0], rtol=2**-8, atol=0)
    else:
        torch.testing.assert_close(
            result[0].float(), expected[0].float(), rtol=bound.relative, atol=bound.absolute
        )


@pytest.mark.parametrize("cache", [INT8, FP8])
def test_codes_of_odd_heads(cache: torch.dtype) -> None:
    """Zeros, tiny numbers, NaN, infinity, and every tie: the reference's codes and scales."""
    largest = 127.0 if cache == INT8 else 448.0
    ties = torch.arange(64) / 2 if cache == INT8 else torch.arange(64) * 2.0**-10
    rows = torch.stack([
        torch.zeros(64), torch.full((64,), 1e-35), torch.full((64,), 1e-20), ties, -ties * 7,
        torch.randn(64) * 100, torch.randn(64), torch.randn(64),
    ])  # fmt: skip
    rows[3, 63], rows[4, 62] = largest, -largest * 7
    rows[6, 5], rows[7, 60] = torch.nan, -torch.inf
    qkv = torch.cat((torch.randn(8, 2 * 64), rows), dim=1)
    expected, result = caches(16, 1, 64, cache), caches(16, 1, 64, cache)
    positions = torch.zeros(8, dtype=torch.int32)
    slots = torch.arange(8, dtype=torch.int32) * 5
    cos_sin = angles(64)
    plain.rotary_store(qkv.clone(), positions, cos_sin, slots, *expected[:2], 1, expected[2])
    rotary_store(qkv.clone(), positions, cos_sin, slots, *result[:2], 1, result[2])
    assert result[2] is not None
    assert expected[2] is not None
    assert torch.equal(result[1].view(torch.uint8), expected[1].view(torch.uint8))
    assert torch.equal(result[2][1].nan_to_num(nan=-1), expected[2][1].nan_to_num(nan=-1))
    held = kv_values(result[1], result[2][1]).flatten(0, 1)[slots.long(), 0]
    assert (held[0] == 0).all()
    assert held[6:].isnan().all()
    assert torch.equal(held[3, 63:], torch.tensor([largest]))


def test_layers_of_one_tensor() -> None:
    """Strided caches and scales; nothing beside the layer is touched."""
    layers = torch.full((BLOCKS, 3, 2, 16, 2, 8), 99, dtype=INT8)
    scales = torch.full((BLOCKS, 3, 2, 16, 2), 99.0)
    before = layers.clone(), scales.clone()
    qkv = torch.randn(2, 6 * 8)
    positions = torch.zeros(2, dtype=torch.int32)
    slots = torch.tensor([17, 5], dtype=torch.int32)
    cos_sin = angles(8)
    expected = caches(16, 2, 8, INT8)
    plain.rotary_store(qkv.clone(), positions, cos_sin, slots, *expected[:2], 2, expected[2])
    rotary_store(
        qkv, positions, cos_sin, slots, layers[:, 1, 0], layers[:, 1, 1], 2,
        (scales[:, 1, 0], scales[:, 1, 1]),
    )  # fmt: skip
    for block, slot in ((1, 1), (0, 5)):
        assert torch.equal(layers[block, 1, 1, slot], expected[1][block, slot])
        before[0][block, 1, :, slot] = layers[block, 1, :, slot]
        before[1][block, 1, :, slot] = scales[block, 1, :, slot]
    assert torch.equal(layers, before[0])
    assert torch.equal(scales, before[1])


def test_refused() -> None:
    k, v, _ = caches(12, 1, 8, F32)
    one = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="block_size 12 is no power of two"):
        rotary_store(torch.zeros(1, 24), one, angles(8), one, k, v, 1)
    k, v, _ = caches(16, 1, 8, INT8)
    with pytest.raises(ValueError, match="scales are for int8"):
        rotary_store(torch.zeros(1, 24), one, angles(8), one, k, v, 1)
    k, v, _ = caches(16, 1, 8, F32)
    with pytest.raises(ValueError, match="qkv of 25 columns"):
        rotary_store(torch.zeros(1, 25), one, angles(8), one, k, v, 1)
    with pytest.raises(ValueError, match="the same strides"):
        rotary_store(torch.zeros(1, 24), one, angles(8), one, k, v[..., ::2].repeat(1, 1, 2, 1), 1)


def test_no_tokens() -> None:
    k, v, _ = caches(16, 1, 8, F32)
    none = torch.zeros(0, dtype=torch.int32)
    rotary_store(torch.zeros(0, 24), none, angles(8), none, k, v, 1)
    assert (k == 3).all()
