"""Products of float matrices whose rows do not depend on one another, nor on how many there are."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from triptych.kernels.triton.tiles import (
    MatmulWorkspace,
    Merge,
    Tile,
    capability,
    dot,
    finish,
    kept_workspace,
    merge_of,
    num_programs,
    place,
    runs_of,
    stages_within,
)
from triptych.kernels.triton.variants import Variant

_BLOCK_K = {torch.bfloat16: 64, torch.float16: 64, torch.float32: 32}  # 128 bytes, a cache line
_WIDE_OUTPUTS = 1024  # from so many tokens and outputs on, tiles of 256 tokens still fill a GPU


@triton.jit
def _sum_of_run(
    lefts, rights, present, columns, first, last,
    BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    lanes = tl.arange(0, BLOCK_K)
    sums = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    for block in range(first, last):
        start = block * BLOCK_K
        if EVEN:
            left = tl.load(lefts + start)
            right = tl.load(rights + start, mask=present, other=0)
        else:
            within = lanes + start < columns
            left = tl.load(lefts + start, mask=within[None, :], other=0)
            right = tl.load(rights + start, mask=within[:, None] & present, other=0)
        sums = dot(left, right, sums)
    return sums


@triton.jit(do_not_specialize=["num_tokens", "runs", "run_blocks"])
def _matmul_kernel(
    x, weight, bias, out, partials, tickets, num_tokens, outputs, columns, x_stride, out_stride,
    runs, run_blocks,
    BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    APART: tl.constexpr = MERGE == "apart"
    tiles_o = tl.cdiv(outputs, BLOCK_O)
    tiles_t = tl.cdiv(num_tokens, BLOCK_T)
    run, tile_o, tile_t = place(tiles_o, tiles_t, APART)
    rows_o = tile_o * BLOCK_O + tl.arange(0, BLOCK_O)
    rows_t = tile_t * BLOCK_T + tl.arange(0, BLOCK_T)
    lanes = tl.arange(0, BLOCK_K)
    # Rows past the end read the last one: what they make is not stored.
    lefts = (
        weight + tl.minimum(rows_o, outputs - 1).to(tl.int64)[:, None] * columns + lanes[None, :]
    )
    rights = x + rows_t.to(tl.int64)[None, :] * x_stride + lanes[:, None]
    present = (rows_t < num_tokens)[None, :]
    blocks = tl.cdiv(columns, BLOCK_K)
    if MERGE == "after":
        total = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
        for each in range(runs):
            first = each * run_blocks
            last = tl.minimum(first + run_blocks, blocks)
            total += _sum_of_run(
                lefts, rights, present, columns, first, last, BLOCK_O, BLOCK_T, BLOCK_K, EVEN
            )
    else:
        first = run * run_blocks
        last = tl.minimum(first + run_blocks, blocks)
        total = _sum_of_run(
            lefts, rights, present, columns, first, last, BLOCK_O, BLOCK_T, BLOCK_K, EVEN
        )
    finish(
        total, rows_o, rows_t, outputs, num_tokens, bias, out, out_stride, partials, tickets,
        run, runs, tile_o * tiles_t + tile_t, tiles_o * tiles_t, BLOCK_O, BLOCK_T, APART,
    )  # fmt: skip


def matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    workspace: MatmulWorkspace | None = None,
) -> None:
    """out [T, O] = x [T, K] weight [O, K]^T + bias [O], summed in float32.

    x and weight: the same of bfloat16, float16 (tensor cores) and float32 (none, and slow); x may
    have any row stride, weight is contiguous; bias and out of any float dtype. A row's bits depend
    on it, weight and bias alone. `workspace` None: one that is kept for the device. Twin:
    `kernels.reference.matmul`. Raises ValueError when dtypes or shapes do not fit.
    """
    tokens, columns = x.shape
    outputs = weight.shape[0]
    if x.dtype != weight.dtype or x.dtype not in _BLOCK_K or not weight.is_contiguous():
        raise ValueError(f"x {x.dtype} and weight {weight.dtype} are not alike, or not supported")
    if weight.shape[1] != columns or out.shape != (tokens, outputs):
        raise ValueError(f"x {x.shape}, weight {weight.shape} and out {out.shape} do not fit")
    if x.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError("rows of x and out must be contiguous")
    if tokens == 0:
        return
    space = workspace or kept_workspace(x.device)
    block = _BLOCK_K[x.dtype]
    runs = runs_of(outputs, columns, block)
    tile = _tile(outputs, tokens, runs.count, x.element_size(), wide=capability(x.device)[0] >= 9)
    stage = block * (tile.outputs + tile.tokens) * x.element_size()
    merge = merge_of(tile, outputs, tokens, runs)
    _matmul_kernel[(num_programs(tile, outputs, tokens, runs, merge),)](
        x, weight, bias, out, space.partials, space.tickets, tokens, outputs, columns,
        x.stride(0), out.stride(0), runs.count, runs.blocks,
        BLOCK_O=tile.outputs, BLOCK_T=tile.tokens, BLOCK_K=block, EVEN=columns % block == 0,
        MERGE=merge, num_warps=tile.num_warps,
        num_stages=stages_within(tile, stage, x.device),
    )  # fmt: skip


def _tile(outputs: int, tokens: int, runs: int, element_size: int, *, wide: bool) -> Tile:
    """The tile for a shape.

    Decoding waits for weights: a stage is 8 KiB of them, and six stages twice or thrice on a
    processor keep more than the 30 KiB in flight that 4.8 TB/s ask of each of an H200's 132.
    From 65 tokens on it is the tensor cores that count: 128 x 128, and 128 x 256 where the
    accumulators are one (runs one after another need two), the tiles still fill the GPU, and its
    operands lie in shared memory (`wide`: of sm_90; before, registers spill).
    """
    if element_size == 4:  # no tensor cores: a thread's share of a tile must fit its registers
        return Tile(64, 16 if tokens <= 16 else 32, 4, 2)
    if tokens <= 16:
        return Tile(64, 16, 4, 6)
    if tokens <= 32:
        return Tile(64, 32, 4, 5)
    if tokens <= 64:
        return Tile(64, 64, 4, 4)
    if wide and runs == 1 and tokens >= _WIDE_OUTPUTS and outputs >= _WIDE_OUTPUTS:
        return Tile(128, 256, 8, 3)
    return Tile(128, 128, 8, 3)


def variants() -> Iterator[Variant]:
    """What the launcher uses for large matrices."""
    pointers = ("x", "weight", "out")
    integers = ("num_tokens", "outputs", "columns", "x_stride", "out_stride", "runs", "run_blocks")
    cases: list[tuple[int, int, Merge]] = [
        (1, 1, "none"), (1, 2, "apart"), (32, 2, "apart"), (64, 2, "apart"),
        (128, 1, "none"), (128, 2, "apart"), (128, 2, "after"), (2048, 1, "none"),
    ]  # fmt: skip
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp32")):
        size = torch.empty(0, dtype=dtype).element_size()
        tiles = [(_tile(4096, each[0], each[1], size, wide=True), each[2]) for each in cases]
        for tile, merge in dict.fromkeys(tiles):
            yield Variant(
                f"{name}-{tile.outputs}x{tile.tokens}-{merge}",
                _matmul_kernel,
                {
                    **dict.fromkeys(pointers, f"*{name}"),
                    **dict.fromkeys(integers, "i32"),
                    "partials": "*fp32",
                    "tickets": "*i32",
                },
                {
                    "bias": None, "BLOCK_O": tile.outputs, "BLOCK_T": tile.tokens,
                    "BLOCK_K": _BLOCK_K[dtype], "EVEN": True, "MERGE": merge,
                },
                frozenset({"outputs", "columns", "x_stride", "out_stride"}),
                tile.num_warps,
                tile.num_stages,
                devices=(90,) if tile.tokens == 256 else (80, 90),
            )  # fmt: skip
