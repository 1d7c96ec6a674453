"""Products with weights of 4 or 8 bits, whose rows depend on nothing but their own numbers.

Codes are widened in registers to the activations' type, exactly, and multiplied by tensor cores;
a group's scale is applied to its sum in float32. So nothing but sums is rounded, and at few tokens
the bytes of the weights are the time.

Widening is a matter of three instructions for two codes: a shift, a mask, and one that puts the
codes where a float's last bits count ones (a 16-bit float of exponent 2^m is 2^m + code); what was
added is then subtracted. Constants, and additions of bits that overlap, are what the compiler turns
into packed instructions and keeps in the layout of the tensor cores' operands; anything more clever
made it shuffle halves or pass by way of shared memory.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from triptych.kernels.reference.quantized_weights import (
    IntWeight,
    QuantizedWeight,
    block_columns,
)
from triptych.kernels.triton.tiles import (
    INTERPRETED,
    MatmulWorkspace,
    Tile,
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

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@triton.jit
def _minus(left, right):
    if INTERPRETED and left.dtype == tl.bfloat16:
        return (left.to(tl.float32) - right.to(tl.float32)).to(tl.bfloat16)
    return left - right


@triton.jit
def _less(left, NUMBER: tl.constexpr):
    if INTERPRETED and left.dtype == tl.bfloat16:
        return (left.to(tl.float32) - NUMBER).to(tl.bfloat16)
    return left - tl.full((1, 1), NUMBER, left.dtype)


@triton.jit
def _times(left, FACTOR: tl.constexpr):
    if INTERPRETED and left.dtype == tl.bfloat16:
        return (left.to(tl.float32) * FACTOR).to(tl.bfloat16)
    return left * tl.full((1, 1), FACTOR, left.dtype)


@triton.jit
def _columns(pairs, DTYPE: tl.constexpr):
    """int32 [O, W] -> the floats of 16 bits that its halves are, [O, 2 W]."""
    low = pairs.to(tl.int16).to(DTYPE, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return tl.join(low, high).reshape(pairs.shape[0], 2 * pairs.shape[1])


@triton.jit
def _int4(words, zero, PART: tl.constexpr, DTYPE: tl.constexpr):
    """Codes less their zero points (int32 [O, 1]; None: 8), exact."""
    base: tl.constexpr = 128 if DTYPE == tl.bfloat16 else 1024
    ones: tl.constexpr = 0x43004300 if DTYPE == tl.bfloat16 else 0x64006400
    codes = (words >> (4 * PART)) & 0x000F000F
    if zero is None:
        codes = codes + (ones + 0x00080008)
    else:
        codes = codes + ((ones + 0x00100010) - zero * 0x00010001)
    return _less(_columns(codes, DTYPE), base + 16)


@triton.jit
def _int8(words, zero, PART: tl.constexpr, DTYPE: tl.constexpr):
    """Codes less their zero points (int32 [O, 1]; None: 0), exact: bfloat16 counts to 256.

    Of two's complement the seven low bits as they are, less the sign's 128.
    """
    ones: tl.constexpr = 0x43004300 if DTYPE == tl.bfloat16 else 0x64006400
    codes = words >> (8 * PART)
    low = _columns((codes & 0x007F007F) | ones, DTYPE)
    sign = _columns((codes & 0x00800080) | ones, DTYPE)
    left = _minus(low, sign)
    return left if zero is None else _minus(left, zero.to(tl.float32).to(DTYPE))


@triton.jit
def _float8(words, PART: tl.constexpr, DTYPE: tl.constexpr):
    """Values of e4m3: its bits in a wider float's places, times what the exponents' biases differ.

    By hand, because GPUs before sm_89 know no e4m3.
    """
    if DTYPE == tl.bfloat16:
        if PART == 0:
            pairs = ((words << 4) & 0x07F007F0) | ((words << 8) & -0x7FFF8000)
        else:
            pairs = ((words >> 4) & 0x07F007F0) | (words & -0x7FFF8000)
        left = _times(_columns(pairs, DTYPE), 2.0**120)
    else:
        if PART == 0:
            pairs = ((words << 7) & 0x3F803F80) | ((words << 8) & -0x7FFF8000)
        else:
            pairs = ((words >> 1) & 0x3F803F80) | (words & -0x7FFF8000)
        left = _times(_columns(pairs, DTYPE), 2.0**8)
    return left


@triton.jit
def _weights(words, zero, PART: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """A part of a block as the activations' type, without its scale: [O, 2 W]."""
    narrow: tl.constexpr = tl.bfloat16 if DTYPE == tl.float32 else DTYPE
    if FORMAT == "int4":
        left = _int4(words, zero, PART, narrow)
    elif FORMAT == "int8":
        left = _int8(words, zero, PART, narrow)
    else:
        left = _float8(words, PART, narrow)
    return left.to(DTYPE)


@triton.jit
def _fetch(pointers):
    """Ask for what lies there, into the second-level cache."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "{ prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
            "=r,l",
            [pointers.to(tl.int64)],
            tl.int32,
            False,
            1,
        )


@triton.jit
def _sum_of_run(
    rights, present, lefts, scales, zeros, scale_stride, columns, first, last,
    BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr, DTYPE: tl.constexpr, FORMAT: tl.constexpr,
    WORDS: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = 4 if FORMAT == "int4" else 2
    WIDTH: tl.constexpr = 2 * WORDS
    # Parts of a block that share a scale, blocks that do, and how many scales a block has.
    SHARING: tl.constexpr = min(GROUP // WIDTH, PARTS) if GROUP else PARTS
    BLOCKS: tl.constexpr = max(GROUP // (WIDTH * PARTS), 1)
    EACH: tl.constexpr = PARTS // SHARING
    lanes = tl.arange(0, WIDTH)
    sums = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    for block in range(first, last):
        words = tl.load(lefts + block * WORDS)
        if GROUP and BLOCK_T <= 32:
            # Loads that no product waits for are not pipelined: memory would be waited for at every
            # block. The last blocks ask again for what they have.
            ahead = tl.minimum(block + 4, last - 1) // BLOCKS * EACH
            for each in tl.static_range(EACH):
                _fetch(scales + (ahead + each) * scale_stride)
                if zeros is not None:
                    _fetch(zeros + (ahead + each) * scale_stride)
        for part in tl.static_range(PARTS):
            start = (block * PARTS + part) * WIDTH
            mask = present if EVEN else present & (lanes + start < columns)[:, None]
            right = tl.load(rights + start, mask=mask, other=0)
            if part % SHARING == 0:
                group = block // BLOCKS * EACH + part // SHARING if GROUP else 0
                if GROUP:
                    scale = tl.load(scales + group * scale_stride).to(tl.float32)
                    grouped = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
                zero = None
                if zeros is not None:
                    zero = tl.load(zeros + group * scale_stride).to(tl.int32)[:, None]
            left = _weights(words, zero, part, FORMAT, DTYPE)
            if GROUP:
                grouped = dot(left, right, grouped)
                if part % SHARING == SHARING - 1:
                    wide = tl.broadcast_to(scale[:, None], (BLOCK_O, BLOCK_T))
                    sums = tl.fma(grouped, wide, sums)
            else:
                sums = dot(left, right, sums)
    if GROUP == 0:
        sums = sums * tl.load(scales).to(tl.float32)[:, None]
    return sums


@triton.jit(do_not_specialize=["num_tokens", "runs", "run_blocks"])
def _quantized_kernel(
    x, words, scales, zeros, bias, out, partials, tickets, num_tokens, outputs, columns,
    word_stride, scale_stride, x_stride, out_stride, runs, run_blocks, blocks,
    BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr, FORMAT: tl.constexpr, WORDS: tl.constexpr,
    GROUP: tl.constexpr, EVEN: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    APART: tl.constexpr = MERGE == "apart"
    tiles_o = tl.cdiv(outputs, BLOCK_O)
    tiles_t = tl.cdiv(num_tokens, BLOCK_T)
    run, tile_o, tile_t = place(tiles_o, tiles_t, APART)
    rows_o = tile_o * BLOCK_O + tl.arange(0, BLOCK_O)
    rows_t = tile_t * BLOCK_T + tl.arange(0, BLOCK_T)
    # Rows past the end read the last one: what they make is not stored.
    inside = tl.minimum(rows_o, outputs - 1)
    lefts = words + inside.to(tl.int64)[:, None] * word_stride + tl.arange(0, WORDS)[None, :]
    lanes = tl.arange(0, 2 * WORDS)
    rights = x + rows_t.to(tl.int64)[None, :] * x_stride + lanes[:, None]
    present = (rows_t < num_tokens)[None, :]
    row_scales = scales + inside
    row_zeros = zeros + inside if zeros is not None else None
    DTYPE: tl.constexpr = x.dtype.element_ty
    if MERGE == "after":
        total = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
        for each in range(runs):
            first = each * run_blocks
            total += _sum_of_run(
                rights, present, lefts, row_scales, row_zeros, scale_stride, columns, first,
                tl.minimum(first + run_blocks, blocks), BLOCK_O, BLOCK_T, DTYPE, FORMAT, WORDS,
                GROUP, EVEN,
            )  # fmt: skip
    else:
        first = run * run_blocks
        total = _sum_of_run(
            rights, present, lefts, row_scales, row_zeros, scale_stride, columns, first,
            tl.minimum(first + run_blocks, blocks), BLOCK_O, BLOCK_T, DTYPE, FORMAT, WORDS,
            GROUP, EVEN,
        )  # fmt: skip
    finish(
        total, rows_o, rows_t, outputs, num_tokens, bias, out, out_stride, partials, tickets,
        run, runs, tile_o * tiles_t + tile_t, tiles_o * tiles_t, BLOCK_O, BLOCK_T, APART,
    )  # fmt: skip


def quantized_matmul(
    x: torch.Tensor,
    weight: QuantizedWeight,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    workspace: MatmulWorkspace | None = None,
) -> None:
    """out [T, O] = x [T, K] times what the weight means, transposed, + bias [O].

    x bfloat16, float16 or float32 (that without tensor cores) of any row stride; bias and out of
    any float dtype. A row's bits depend on it, weight and bias alone. `workspace` as of `matmul`.
    Twin: `kernels.reference.quantized_matmul`. Raises ValueError when dtypes or shapes do not fit.
    """
    tokens, columns = x.shape
    outputs = weight.outputs
    if x.dtype not in _DTYPES:
        raise ValueError(f"x {x.dtype} is not supported")
    if weight.columns != columns or out.shape != (tokens, outputs):
        raise ValueError(
            f"x {x.shape}, weight {(outputs, weight.columns)} and out {out.shape} do not fit"
        )
    if x.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError("rows of x and out must be contiguous")
    if tokens == 0:
        return
    if isinstance(weight, IntWeight):
        name, zeros = f"int{weight.bits}", weight.zeros
    else:
        name, zeros = "fp8", None
    space = workspace or kept_workspace(x.device)
    block = block_columns(4 if name == "int4" else 8, weight.group)
    runs = runs_of(outputs, columns, block)
    tile = _tile(name, tokens, runs.count, x.element_size())
    stage = 4 * weight.block_words * tile.outputs + block * tile.tokens * x.element_size()
    merge = merge_of(tile, outputs, tokens, runs)
    _quantized_kernel[(num_programs(tile, outputs, tokens, runs, merge),)](
        x, weight.words, weight.scales, zeros, bias, out, space.partials, space.tickets, tokens,
        outputs, columns, weight.words.stride(0), weight.scales.stride(0), x.stride(0),
        out.stride(0), runs.count, runs.blocks, triton.cdiv(columns, block),
        BLOCK_O=tile.outputs, BLOCK_T=tile.tokens, FORMAT=name, WORDS=weight.block_words,
        GROUP=weight.group, EVEN=columns % block == 0, MERGE=merge,
        num_warps=tile.num_warps, num_stages=stages_within(tile, stage, x.device),
    )  # fmt: skip


def _tile(name: str, tokens: int, runs: int, element_size: int) -> Tile:
    """The tile for a shape.

    Few tokens: 64 outputs, so that there are enough programs, and stages enough to keep 30 KiB of
    weights in flight on a processor. Many: 128 outputs, so that widening a weight pays for as many
    tokens as registers hold sums of: two of each (a group's and all), three where runs follow one
    another.
    """
    if element_size == 4:
        return Tile(64, 16, 4, 2)
    if tokens <= 16:
        return Tile(64, 16, 4, 4)
    if tokens <= 32:
        return Tile(64, 32, 4, 3)
    if tokens <= 64 or runs > 1 or name == "int4":
        return Tile(128, 64, 8, 2 if name == "int4" else 3)
    return Tile(128, 128, 8, 3)


def variants() -> Iterator[Variant]:
    """What the launcher uses for large matrices."""
    forms = [
        ("int4", 128, "*i8"), ("int4", 128, None), ("int4", 32, "*i8"), ("int4", 0, None),
        ("int8", 32, None), ("int8", 128, "*i16"), ("int8", 0, None), ("fp8", 0, None),
        ("fp8", 128, None),
    ]  # fmt: skip
    cases = ((1, 1, "none"), (1, 2, "apart"), (32, 2, "apart"), (128, 2, "after"), (128, 1, "none"))
    integers = (
        "num_tokens", "outputs", "columns", "word_stride", "scale_stride", "x_stride",
        "out_stride", "runs", "run_blocks", "blocks",
    )  # fmt: skip
    for dtype, (name, group, zeros) in [
        *[("bf16", form) for form in forms],
        ("fp16", forms[0]),
        ("fp32", forms[0]),
    ]:
        tiles = [
            (_tile(name, tokens, runs, 4 if dtype == "fp32" else 2), merge)
            for tokens, runs, merge in cases
        ]
        for tile, merge in dict.fromkeys(tiles):
            form = f"{name}-{group}{'z' if zeros else ''}-{dtype}"
            yield Variant(
                f"{form}-{tile.outputs}x{tile.tokens}-{merge}",
                _quantized_kernel,
                {
                    **dict.fromkeys(("x", "out"), f"*{dtype}"), "words": "*i32",
                    "scales": "*fp32" if name == "fp8" else "*fp16", "partials": "*fp32",
                    "tickets": "*i32", **dict.fromkeys(integers, "i32"),
                    **({"zeros": zeros} if zeros else {}),
                },
                {
                    "bias": None, **({} if zeros else {"zeros": None}), "BLOCK_O": tile.outputs,
                    "BLOCK_T": tile.tokens, "FORMAT": name, "WORDS": 16 if group == 32 else 32,
                    "GROUP": group, "EVEN": True, "MERGE": merge,
                },
                frozenset(integers) - {"num_tokens", "runs", "run_blocks", "blocks"},
                tile.num_warps,
                tile.num_stages,
                # Without tensor cores it is slow in any case, and for tests.
                max_spills=32 if dtype == "fp32" else 0,
            )  # fmt: skip
