"""Products of 8-bit weights and activations rounded to 8 bits as they come: twice the tensor cores'
rate, for prompts and large batches.

Weights are the packed words of `quantized_matmul`, read as bytes: `quantize_tokens` puts the codes
of activations in the same order of columns, and a sum of products does not mind which.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from triptych.kernels.reference.quantized_weights import Float8Weight
from triptych.kernels.reference.w8a8_matmul import ByteWeight, check_byte_weight, padded_columns
from triptych.kernels.triton.tiles import (
    MatmulWorkspace,
    Tile,
    capability,
    finish,
    kept_workspace,
    merge_of,
    num_programs,
    place,
    runs_of,
    stages_within,
)
from triptych.kernels.triton.variants import Variant

_BLOCK = 128  # bytes of a row at a time
_TOKEN_BLOCK = 1024
_ROUND = tl.constexpr(
    12582912.0
)  # 1.5 * 2^23: added to a small float32, it leaves the nearest integer


@triton.jit
def _nearest(value):
    """A float32 of magnitude below 2^22 to an integer, halves to even."""
    return (value + _ROUND) - _ROUND


@triton.jit
def _float8_code(value):
    """The nearest e4m3, halves to even, of a float32 within its range; int32.

    By hand, because GPUs before sm_89 cannot convert, and Triton's interpreter does it wrong.
    """
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # 20 of 23 mantissa bits go; of exponents, whose bias is 127, those from 2^-6 on stay.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    small = _nearest(tl.abs(value) * 512).to(tl.int32)
    code = tl.where(tl.abs(value) < 0.015625, small, normal)
    return code | ((bits >> 24) & 0x80)


@triton.jit
def _quantize_kernel(
    x, codes, scales, columns, x_stride, padded, INTEGER: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        within = start + lanes < columns
        part = tl.load(x + token * x_stride + start + lanes, mask=within, other=0)
        largest = tl.maximum(largest, tl.abs(part.to(tl.float32)))
    most: tl.constexpr = 127.0 if INTEGER else 448.0
    # The least normal number: a quotient by less could be infinite.
    scale = tl.maximum(tl.div_rn(tl.max(largest, 0), most), 1.1754943508222875e-38)
    tl.store(scales + token, scale)
    # Byte 4 w + 2 h + p of a block is column 64 p + 2 w + h.
    order = lanes // 128 * 128 + lanes % 2 * 64 + lanes % 128 // 4 * 2 + lanes // 2 % 2
    for start in range(0, padded, BLOCK):
        within = start + order < columns
        part = tl.load(x + token * x_stride + start + order, mask=within, other=0)
        value = tl.div_rn(part.to(tl.float32), scale)
        value = tl.minimum(tl.maximum(value, -most), most)
        code = _nearest(value).to(tl.int32) if INTEGER else _float8_code(value)
        tl.store(
            codes + token * padded + start + lanes, code.to(tl.uint8), mask=start + lanes < padded
        )


def quantize_tokens(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """codes [T, P] (int8 or e4m3) and scales float32 [T] of x [T, K], any float dtype.

    P is `padded_columns` of the weight. Numbers are taken to be finite. Twin:
    `kernels.reference.w8a8_matmul`. Raises ValueError when shapes do not fit.
    """
    tokens, columns = x.shape
    padded = codes.shape[1]
    if padded != -(-columns // _BLOCK) * _BLOCK or codes.shape[0] != tokens or x.stride(1) != 1:
        raise ValueError(f"x {x.shape} and codes {codes.shape} do not fit")
    if not codes.is_contiguous() or scales.shape != (tokens,):
        raise ValueError(f"codes must be contiguous, and scales {scales.shape} one a token")
    if tokens:
        _quantize_kernel[(tokens,)](
            x,
            codes.view(torch.uint8),
            scales,
            columns,
            x.stride(0),
            padded,
            INTEGER=codes.dtype == torch.int8,
            BLOCK=_TOKEN_BLOCK,
        )


@triton.jit
def _sum_of_run(
    rights, present, lefts, scales, scale_stride, first, last,
    BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, INTEGER: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    sums = tl.zeros((BLOCK_O, BLOCK_T), tl.int32 if INTEGER else tl.float32)
    for block in range(first, last):
        left = tl.load(lefts + block * BLOCK_K)
        right = tl.load(rights + block * BLOCK_K, mask=present)  # others are not stored
        if INTEGER:
            sums = tl.dot(left, right, sums, out_dtype=tl.int32)
        else:
            # Of e4m3 a GPU sums with fewer bits: 128 columns at a time, which go to float32.
            grouped = tl.dot(left, right, tl.zeros((BLOCK_O, BLOCK_T), tl.float32))
            if GROUP:
                scale = tl.load(scales + block * scale_stride)
                wide = tl.broadcast_to(scale[:, None], (BLOCK_O, BLOCK_T))
                sums = tl.fma(grouped, wide, sums)
            else:
                sums += grouped
    total = sums.to(tl.float32)
    return total if GROUP else total * tl.load(scales).to(tl.float32)[:, None]


@triton.jit(do_not_specialize=["num_tokens", "runs", "run_blocks"])
def _w8a8_kernel(
    codes, token_scales, weight, scales, bias, out, partials, tickets, num_tokens, outputs, padded,
    scale_stride, out_stride, runs, run_blocks,
    BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, INTEGER: tl.constexpr,
    GROUP: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    APART: tl.constexpr = MERGE == "apart"
    tiles_o = tl.cdiv(outputs, BLOCK_O)
    tiles_t = tl.cdiv(num_tokens, BLOCK_T)
    run, tile_o, tile_t = place(tiles_o, tiles_t, APART)
    rows_o = tile_o * BLOCK_O + tl.arange(0, BLOCK_O)
    rows_t = tile_t * BLOCK_T + tl.arange(0, BLOCK_T)
    # Rows past the end read the last one: what they make is not stored.
    inside = tl.minimum(rows_o, outputs - 1)
    lanes = tl.arange(0, BLOCK_K)
    lefts = weight + inside.to(tl.int64)[:, None] * padded + lanes[None, :]
    rights = codes + rows_t.to(tl.int64)[None, :] * padded + lanes[:, None]
    present = (rows_t < num_tokens)[None, :]
    blocks = padded // BLOCK_K
    if MERGE == "after":
        total = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
        for each in range(runs):
            first = each * run_blocks
            total += _sum_of_run(
                rights, present, lefts, scales + inside, scale_stride, first,
                tl.minimum(first + run_blocks, blocks), BLOCK_O, BLOCK_T, BLOCK_K, INTEGER, GROUP,
            )  # fmt: skip
    else:
        first = run * run_blocks
        total = _sum_of_run(
            rights, present, lefts, scales + inside, scale_stride, first,
            tl.minimum(first + run_blocks, blocks), BLOCK_O, BLOCK_T, BLOCK_K, INTEGER, GROUP,
        )  # fmt: skip
    # A run's sum times its token's scale before runs are added: the same whoever adds them.
    total = total * tl.load(token_scales + rows_t, mask=rows_t < num_tokens, other=0)[None, :]
    finish(
        total, rows_o, rows_t, outputs, num_tokens, bias, out, out_stride, partials, tickets,
        run, runs, tile_o * tiles_t + tile_t, tiles_o * tiles_t, BLOCK_O, BLOCK_T, APART,
    )  # fmt: skip


def w8a8_matmul(
    codes: torch.Tensor,
    token_scales: torch.Tensor,
    weight: ByteWeight,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    workspace: MatmulWorkspace | None = None,
) -> None:
    """out [T, O] = token_scales * codes [T, P] times what the weight means, transposed, + bias [O].

    codes and token_scales as `quantize_tokens` makes them: int8 for an IntWeight (of whole rows,
    without zero points), e4m3 for a Float8Weight (sm_89 or later). bias and out of any float dtype.
    A row's bits depend on it, weight and bias alone. `workspace` as of `matmul`. Twin:
    `kernels.reference.w8a8_matmul`. Raises ValueError when dtypes or shapes do not fit.
    """
    check_byte_weight(weight)
    integer = not isinstance(weight, Float8Weight)
    dtype = torch.int8 if integer else torch.float8_e4m3fn
    tokens, outputs, padded = codes.shape[0], weight.outputs, padded_columns(weight)
    if codes.shape[1] != padded or out.shape != (tokens, outputs) or codes.dtype != dtype:
        raise ValueError(
            f"codes {codes.dtype} {codes.shape}, weight {(outputs, padded)} and out {out.shape} "
            f"do not fit"
        )
    if not codes.is_contiguous() or out.stride(1) != 1:
        raise ValueError("codes and rows of out must be contiguous")
    if not integer and capability(codes.device) < (8, 9):
        raise ValueError("e4m3 activations need a GPU of compute capability 8.9 or later")
    if tokens == 0:
        return
    space = workspace or kept_workspace(codes.device)
    runs = runs_of(outputs, padded, _BLOCK)
    tile = _tile(tokens, runs.count, integer=integer)
    merge = merge_of(tile, outputs, tokens, runs)
    stages = stages_within(tile, _BLOCK * (tile.outputs + tile.tokens), codes.device)
    _w8a8_kernel[(num_programs(tile, outputs, tokens, runs, merge),)](
        codes, token_scales, weight.words.view(dtype), weight.scales, bias, out, space.partials,
        space.tickets, tokens, outputs, padded, weight.scales.stride(0), out.stride(0), runs.count,
        runs.blocks, BLOCK_O=tile.outputs, BLOCK_T=tile.tokens, BLOCK_K=_BLOCK, INTEGER=integer,
        GROUP=weight.group, MERGE=merge, num_warps=tile.num_warps, num_stages=stages,
    )  # fmt: skip


def _tile(tokens: int, runs: int, *, integer: bool) -> Tile:
    """As of `matmul`, whose bytes a stage it has; sums of e4m3 take two accumulators."""
    if tokens <= 16:
        return Tile(64, 16, 4, 6)
    if tokens <= 32:
        return Tile(64, 32, 4, 5)
    if tokens <= 64 or (runs > 1 and not integer):
        return Tile(128, 64, 8, 4)
    return Tile(128, 128, 8, 4)


def variants() -> Iterator[Variant]:
    """What the launchers use for large matrices."""
    cases = ((1, 1, "none"), (1, 2, "apart"), (64, 2, "apart"), (128, 1, "none"), (128, 2, "after"))
    integers = (
        "num_tokens", "outputs", "padded", "scale_stride", "out_stride", "runs", "run_blocks",
    )  # fmt: skip
    for name, group in (("i8", 0), ("fp8e4nv", 0), ("fp8e4nv", 128)):
        devices = (80, 90) if name == "i8" else (90,)
        for tokens, runs, merge in cases:
            tile = _tile(tokens, runs, integer=name == "i8")
            yield Variant(
                f"{name}-{group}-{tile.outputs}x{tile.tokens}-{merge}",
                _w8a8_kernel,
                {
                    "codes": f"*{name}", "weight": f"*{name}", "out": "*bf16",
                    "scales": "*fp16" if name == "i8" else "*fp32", "token_scales": "*fp32",
                    "partials": "*fp32", "tickets": "*i32", **dict.fromkeys(integers, "i32"),
                },
                {
                    "bias": None, "BLOCK_O": tile.outputs, "BLOCK_T": tile.tokens,
                    "BLOCK_K": _BLOCK, "INTEGER": name == "i8", "GROUP": group, "MERGE": merge,
                },
                frozenset({"outputs", "padded", "scale_stride", "out_stride"}),
                tile.num_warps,
                tile.num_stages,
                devices=devices,
            )  # fmt: skip
        if group == 0:
            yield Variant(
                f"quantize-{name}",
                _quantize_kernel,
                {
                    "x": "*bf16", "codes": "*u8", "scales": "*fp32", "columns": "i32",
                    "x_stride": "i32", "padded": "i32",
                },
                {"INTEGER": name == "i8", "BLOCK": _TOKEN_BLOCK},
                frozenset({"columns", "x_stride", "padded"}),
                devices=devices,
            )  # fmt: skip
