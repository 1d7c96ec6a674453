"""Calls of the attention kernels on `attention_cases`, checked against float64.

Only for tests that may import triton.
"""

import torch

from attention_cases import Case, truth
from triptych.kernels.ops import PAGED_ATTENTION
from triptych.kernels.triton.paged_attention import (
    decode_attention,
    decode_workspace,
    prefill_attention,
)


def prefilled(case: Case, workspace: torch.Tensor | None = None) -> torch.Tensor:
    shape = case.shape
    out = torch.full_like(case.q, 7.0)
    prefill_attention(
        case.q, case.k_cache, case.v_cache, case.row_starts, case.kv_lengths, case.block_tables,
        out, shape.scale, shape.window, shape.cap, case.scales, workspace,
    )  # fmt: skip
    return out


def decoded(case: Case, max_bytes: int | None = None) -> torch.Tensor:
    """Of each row's last query."""
    shape = case.shape
    out = torch.full_like(case.q[: len(case.rows)], 7.0)
    tokens = case.block_tables.shape[1] * shape.block_size
    size = decode_workspace(len(case.rows), shape.heads, shape.head_dim, tokens, max_bytes)
    decode_attention(
        case.q[case.last], case.k_cache, case.v_cache, case.block_tables, case.kv_lengths, out,
        torch.full((size,), torch.nan), shape.scale, shape.window, shape.cap, case.scales,
    )  # fmt: skip
    return out


def near(result: torch.Tensor, expected: torch.Tensor) -> bool:
    bound = PAGED_ATTENTION.tolerance("float32" if result.dtype == torch.float32 else "bfloat16")
    allowed = bound.absolute + bound.relative * expected.abs()
    return bool(((result.double() - expected).abs() <= allowed).all())


def check(case: Case) -> None:
    expected = truth(case)
    assert near(prefilled(case), expected)
    assert near(decoded(case), expected[case.last])
