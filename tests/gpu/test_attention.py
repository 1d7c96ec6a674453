"""Attention and the write of keys on a GPU: against float64, and the same bits both ways."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from attention_cases import Case, Shape, make_case, truth
from attention_launches import prefilled
from triptych.kernels.ops import PAGED_ATTENTION
from triptych.kernels.reference import rotary_store as plain
from triptych.kernels.triton.paged_attention import (
    decode_attention,
    decode_workspace,
)
from triptych.kernels.triton.rotary_store import rotary_store

BF16, INT8, FP8 = torch.bfloat16, torch.int8, torch.float8_e4m3fn
ROWS = [(1, 1), (64, 64), (1, 1500), (3, 256), (130, 700), (1, 513), (16, 2000), (1, 257)]


@pytest.fixture(autouse=True)
def on_the_device() -> Iterator[None]:
    with torch.device("cuda"):
        yield


def decoded(case: Case, rows: torch.Tensor, workspace: torch.Tensor) -> torch.Tensor:
    """The last query of some rows."""
    shape = case.shape
    q = case.q[case.last[rows]]
    out = torch.full_like(q, 7.0)
    decode_attention(
        q, case.k_cache, case.v_cache, case.block_tables[rows], case.kv_lengths[rows], out,
        workspace, shape.scale, shape.window, shape.cap, case.scales,
    )  # fmt: skip
    return out


@pytest.mark.parametrize(
    "shape",
    [
        Shape(heads=32, kv_heads=8, head_dim=128, dtype=BF16),
        Shape(heads=32, kv_heads=8, head_dim=64, dtype=BF16, window=300),
        Shape(heads=6, kv_heads=6, head_dim=80, dtype=torch.float16),
        Shape(heads=8, kv_heads=4, head_dim=256, dtype=BF16, window=512, cap=50.0),
        Shape(heads=14, kv_heads=2, head_dim=64, dtype=torch.float32),
        Shape(heads=32, kv_heads=8, head_dim=128, dtype=BF16, cache=INT8),
        Shape(heads=32, kv_heads=8, head_dim=128, dtype=BF16, cache=FP8),
        Shape(heads=71, kv_heads=1, head_dim=64, dtype=BF16),
    ],
    ids=repr,
)
def test_near_the_truth_and_the_same_bits(shape: Shape) -> None:
    torch.manual_seed(1)
    case = make_case(shape, ROWS)
    expected = truth(case)
    size = decode_workspace(64, shape.heads, shape.head_dim, 4096)
    workspace = torch.full((size,), torch.nan)
    whole = prefilled(case)
    bound = PAGED_ATTENTION.tolerance("float32" if shape.dtype == torch.float32 else "bfloat16")
    allowed = bound.absolute + bound.relative * expected.abs()
    assert ((whole.double() - expected).abs() <= allowed).all()

    rows = torch.arange(len(ROWS))
    assert torch.equal(prefilled(case, workspace), whole)
    assert torch.equal(decoded(case, rows, workspace), whole[case.last])
    assert torch.equal(decoded(case, rows[4:5], workspace), whole[case.last[4:5]])
    little = workspace[: 9 * shape.heads * (shape.head_dim + 2)]
    assert torch.equal(decoded(case, rows, little), whole[case.last])
    # The long prompt, cut: its first 50 tokens are prefilled on their own, as are its last 80.
    begin, length = int(case.row_starts[4]), 700
    for first, count in ((0, 50), (50, 80)):
        cut = replace(
            case, q=case.q[begin + first : begin + first + count],
            row_starts=torch.tensor([0, count], dtype=torch.int32),
            kv_lengths=torch.tensor([length - 130 + first + count], dtype=torch.int32),
            block_tables=case.block_tables[4:5],
        )  # fmt: skip
        assert torch.equal(prefilled(cut), whole[begin + first : begin + first + count])


@pytest.mark.parametrize("cache", [BF16, INT8, FP8])
@pytest.mark.parametrize("head_dim", [80, 128])
def test_rotary_store(head_dim: int, cache: torch.dtype) -> None:
    tokens, heads, kv_heads = 67, 12, 3
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim).to(BF16)
    positions = torch.randint(0, 500, (tokens,), dtype=torch.int32)
    slots = torch.randperm(8 * 16)[:tokens].to(torch.int32)
    slots[3], positions[3] = -1, 2**30
    radians = torch.rand(500, head_dim // 2) * 6
    cos_sin = torch.cat((radians.cos(), radians.sin()), dim=1)
    full = (8, 16, kv_heads, head_dim)
    k, v = (torch.zeros(full).to(cache) for _ in range(2))
    scales = None if cache == BF16 else (torch.zeros(full[:3]), torch.zeros(full[:3]))
    expected = qkv.clone(), k.clone(), v.clone()
    expected_scales = None if scales is None else (scales[0].clone(), scales[1].clone())
    # 2**30 is no position: padding is not looked at.
    plain.rotary_store(
        expected[0], positions, cos_sin, slots, *expected[1:], heads, expected_scales
    )
    rotary_store(qkv, positions, cos_sin, slots, k, v, heads, scales)
    width = heads * head_dim
    torch.testing.assert_close(
        qkv[:, :width].float(), expected[0][:, :width].float(), rtol=2**-7, atol=1e-6
    )
    assert torch.equal(v.view(torch.uint8), expected[2].view(torch.uint8))
    different = k.view(torch.uint8) != expected[1].view(torch.uint8)
    assert different.float().mean() < 0.01  # a key that is rounded otherwise in its last bit
    if scales is not None and expected_scales is not None:
        assert torch.equal(scales[1], expected_scales[1])
