"""Keys and values as scaled codes, and what attention reads of them."""

import pytest
import torch

from triptych.kernels.reference.kv_codes import LARGEST, kv_codes, kv_values
from triptych.kernels.reference.paged_attention import PagedRows, paged_attention
from triptych.kernels.reference.rotary_store import rotary_store

torch.set_num_threads(1)

DTYPES = [torch.int8, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounded_to_the_nearest_code(dtype: torch.dtype) -> None:
    x = torch.randn(50, 3, 64) * 10.0 ** torch.randint(-9, 9, (50, 3, 1))
    codes, scales = kv_codes(x, dtype)
    assert codes.dtype == dtype
    assert codes.to(torch.float32).abs().amax(-1).eq(LARGEST[dtype]).all()
    scaled = (x / scales.unsqueeze(-1)).double()
    every = torch.arange(256).to(torch.uint8).view(dtype).double()
    every = every[every.isfinite() & (every.abs() <= LARGEST[dtype])]
    distances = (scaled.unsqueeze(-1) - every).abs().amin(-1)
    assert ((scaled - codes.double()).abs() <= distances + 1e-12).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_odd_heads(dtype: torch.dtype) -> None:
    x = torch.zeros(4, 1, 8)
    x[1] = 1e-35
    x[2, 0, 3] = torch.nan
    x[3, 0, 7] = -torch.inf
    codes, scales = kv_codes(x, dtype)
    values = kv_values(codes, scales)
    assert (values[:2] == 0).all()
    assert values[2:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_reads_what_was_stored(dtype: torch.dtype) -> None:
    """Codes with scales give what the numbers that they stand for give."""
    tokens, heads, kv_heads, head_dim = 9, 4, 2, 16
    full = (3, 4, kv_heads, head_dim)
    k_cache, v_cache = torch.zeros(full).to(dtype), torch.zeros(full).to(dtype)
    scales = torch.full(full[:3], torch.nan), torch.full(full[:3], torch.nan)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim)
    before = qkv.clone()
    angles = torch.rand(tokens, head_dim // 2)
    positions = torch.arange(tokens, dtype=torch.int32)
    slots = torch.tensor([8, 9, 10, 11, 0, 1, 2, 3, 4], dtype=torch.int32)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    rotary_store(qkv, positions, cos_sin, slots, k_cache, v_cache, heads, scales)
    assert torch.equal(qkv[:, heads * head_dim :], before[:, heads * head_dim :])
    norms = [x[:, : heads * head_dim].norm(dim=1) for x in (qkv, before)]
    torch.testing.assert_close(*norms)

    rows = PagedRows(torch.tensor([[2, 0, 1]]), torch.tensor([0, tokens]), torch.tensor([tokens]))
    q = qkv[:, : heads * head_dim].view(tokens, heads, head_dim)
    coded = paged_attention(q, k_cache, v_cache, rows, 0.25, scales=scales)
    plain = paged_attention(
        q, kv_values(k_cache, scales[0]), kv_values(v_cache, scales[1]), rows, 0.25
    )
    assert torch.equal(coded, plain)
    v = before.view(tokens, -1, head_dim)[:, heads + kv_heads :]
    stored = kv_values(v_cache, scales[1]).flatten(0, 1)[slots.long()]
    step = v.abs().amax(-1, keepdim=True) / (127 if dtype == torch.int8 else 14)
    assert ((stored - v).abs() <= step * 0.51).all()


def test_rows_without_keys_get_zeros() -> None:
    cache = torch.full((1, 4, 1, 8), torch.nan)
    rows = PagedRows(torch.tensor([[7]]), torch.tensor([0, 1]), torch.tensor([0]))
    assert (paged_attention(torch.ones(1, 1, 8), cache, cache, rows, 1.0) == 0).all()
