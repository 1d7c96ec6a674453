"""Rows of the embedding table, or of a rank's part of it."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from triptych.kernels.triton.variants import Variant

_BLOCK = 1024


@triton.jit
def _embed_kernel(
    token_ids, table, out, first, rows, size, stride, out_stride, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(token_ids + token) - first
    here = (row >= 0) & (row < rows)
    place = tl.where(here, row, 0).to(tl.int64)
    values = tl.load(table + place * stride + lanes, mask=lanes < size, other=0.0)
    values = tl.where(here, values, tl.zeros_like(values))
    tl.store(out + token * out_stride + lanes, values.to(out.dtype.element_ty), mask=lanes < size)


def embed(token_ids: torch.Tensor, table: torch.Tensor, first: int, out: torch.Tensor) -> None:
    """out [T, H] = table[token_ids - first], zeros where an id is not in the table [rows, H]."""
    tokens, size = out.shape
    if tokens:
        _embed_kernel[(tokens, triton.cdiv(size, _BLOCK))](
            token_ids, table, out, first, len(table), size, table.stride(0), out.stride(0),
            BLOCK=_BLOCK,
        )  # fmt: skip


def variants() -> Iterator[Variant]:
    """All of them."""
    integers = ("first", "rows", "size", "stride", "out_stride")
    for dtype in ("bf16", "fp16", "fp32"):
        arguments = {
            "token_ids": "*i32", "table": f"*{dtype}", "out": f"*{dtype}",
            **dict.fromkeys(integers, "i32"),
        }  # fmt: skip
        yield Variant(
            dtype, _embed_kernel, arguments, {"BLOCK": _BLOCK},
            aligned=frozenset({"size", "stride", "out_stride"}),
        )  # fmt: skip
