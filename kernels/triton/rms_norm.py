"""Root mean square norm, with what is added to the residual stream before it: one pass."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from triptych.kernels.triton.variants import Variant

_LONGEST = 32768  # of a row: one program holds it


@triton.jit
def _add_rms_norm_kernel(
    x, residual, weight, out, x_stride, residual_stride, out_stride, size, epsilon,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    within = lanes < size
    values = tl.load(x + row * x_stride + lanes, mask=within, other=0.0)
    if residual is not None:
        places = residual + row * residual_stride + lanes
        stream = tl.load(places, mask=within, other=0.0)
        total = (stream.to(tl.float32) + values.to(tl.float32)).to(stream.dtype)
        tl.store(places, total, mask=within)
        wide = total.to(tl.float32)
    else:
        wide = values.to(tl.float32)
    mean_square = tl.sum(wide * wide, axis=0) / size
    scaled = wide * tl.rsqrt(mean_square + epsilon)
    gained = scaled * tl.load(weight + lanes, mask=within, other=0.0)
    tl.store(out + row * out_stride + lanes, gained.to(out.dtype.element_ty), mask=within)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    out: torch.Tensor,
) -> None:
    """residual += x (rounded to its dtype) if there is one; out = norm(residual or x) * weight.

    x, residual, out [T, H], rows contiguous; weight float32 [H]. A row is computed by one program,
    in one order: its bits depend on nothing else. Twin: `kernels.reference.rms_norm`. Raises
    ValueError for rows longer than 32768.
    """
    tokens, size = x.shape
    if size > _LONGEST:
        raise ValueError(f"a row of {size}, at most {_LONGEST} fit")
    if tokens:
        _add_rms_norm_kernel[(tokens,)](
            x, residual, weight, out,
            x.stride(0), 0 if residual is None else residual.stride(0), out.stride(0),
            size, epsilon,
            BLOCK=triton.next_power_of_2(size), num_warps=_warps(size),
        )  # fmt: skip


def _warps(size: int) -> int:
    return min(16, max(1, triton.next_power_of_2(size) // 512))


def variants() -> Iterator[Variant]:
    """Hidden sizes of models, heads of models with norms of queries and keys."""
    integers = ("x_stride", "residual_stride", "out_stride", "size")
    for dtype in ("bf16", "fp16", "fp32"):
        for size in (64, 128, 2048, 4096, 8192):
            for residual in (False, True):
                given = ("x", "out", *(("residual",) if residual else ()))
                yield Variant(
                    f"{dtype}-{size}{'-residual' if residual else ''}",
                    _add_rms_norm_kernel,
                    {
                        **dict.fromkeys(given, f"*{dtype}"),
                        **dict.fromkeys(integers, "i32"),
                        "weight": "*fp32",
                        "epsilon": "fp32",
                    },
                    {"BLOCK": size, **({} if residual else {"residual": None})},
                    aligned=frozenset(integers),
                    num_warps=_warps(size),
                )
