"""What decode and prefill share: a tile of keys met by a tile of queries, and partitions merged.

Softmax with a running maximum, as FlashAttention has it (Dao et al. 2022, arXiv:2205.14135), in
base 2. The maximum is rounded up to an integer, so everything that is rescaled is multiplied by a
power of two and loses nothing. Hence the bits of a result do not depend on whether the compiler
makes one instruction of a product and a sum, nor on when partitions are rescaled, only on the
order in which they are added: that is always by position.
"""

import triton
import triton.language as tl

NOTHING = tl.constexpr(-1e30)
"""The maximum of no scores: finite, so that nothing less nothing is no NaN."""

VARYING = {
    "do_not_specialize": ["num_rows", "capacity"],
    "do_not_specialize_on_alignment": ["row_starts", "kv_lengths", "block_tables"],
}
"""What no kernel is to be compiled anew for: it differs from step to step."""


@triton.jit
def power_of_two(exponent):
    """2^exponent of whole numbers <= 0, exact; 0 below -126."""
    shifted = (tl.maximum(exponent, -127.0) + 127.0).to(tl.int32)
    return (shifted << 23).to(tl.float32, bitcast=True)


@triton.jit
def as_floats(x, CODES: tl.constexpr, FLOAT: tl.constexpr):
    """Cached numbers, or codes of scaled ones, as FLOAT. Codes are exact in all float types."""
    if CODES == "fp8":
        # By way of float16 and float32: there are fast instructions for each of these steps, and
        # only a slow one from float16 to bfloat16, which Triton would take.
        values = x.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32).to(FLOAT)
    elif CODES == "fp8_bits":
        # For devices without e4m3: its fields, put where float32 has them, are 2^-120 of the value.
        bits = x.to(tl.uint32)
        bits = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
        values = (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(FLOAT)
    else:
        values = x.to(FLOAT)
    return values


@triton.jit
def blocks_of(table, start, length, KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Block ids int32 [KEYS] of keys start and on; of the sequence's last block behind it.

    To be read a tile ahead and carried from one round of a loop to the next: where the ids are read
    in the round that needs them, Triton copies them asynchronously, and in order to have them waits
    for all copies that were begun before, which are the keys and values.
    """
    last = tl.maximum(length - 1, 0) // BLOCK_SIZE
    if KEYS > 4 * BLOCK_SIZE:
        blocks = tl.load(table + tl.minimum((start + tl.arange(0, KEYS)) // BLOCK_SIZE, last))
    else:
        first = start // BLOCK_SIZE
        blocks = tl.full([KEYS], 0, tl.int32) + tl.load(table + tl.minimum(first, last))
        for step in tl.static_range(1, KEYS // BLOCK_SIZE):
            block = tl.load(table + tl.minimum(first + step, last))
            blocks = tl.where(tl.arange(0, KEYS) // BLOCK_SIZE == step, block, blocks)
    return blocks


@triton.jit
def attend_keys(
    q, sums, peak, total,
    start, length, positions, lowest, highest,
    blocks, k_cache, v_cache, k_scales, v_scales, kv_head,
    block_stride, slot_stride, head_stride, scale_block_stride, scale_slot_stride,
    factor, cap_factor, window,
    HEAD_DIM: tl.constexpr, WIDE: tl.constexpr, KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    CODES: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Meet keys [start, start + KEYS) of a sequence; (sums, peak, total) with them.

    q [ROWS, WIDE] at `positions` [ROWS] from `lowest` to `highest`; blocks [KEYS]: `blocks_of`.
    sums [ROWS, WIDE] of exp2(score - peak) * value, total [ROWS] of exp2(score - peak), where
    a score is factor * (q . k), or with a cap factor * tanh(cap_factor / 2 / log2(e) * (q . k)).
    """
    keys = start + tl.arange(0, KEYS)
    # Behind the last token there may be NaN, which would survive a weight of zero. No mask of the
    # loads is needed if that token is read again instead.
    places = tl.minimum(keys, length - 1)
    blocks = blocks.to(tl.int64)
    inner = places % BLOCK_SIZE
    columns = tl.arange(0, WIDE)
    rows = blocks * block_stride + inner * slot_stride + kv_head * head_stride
    offsets = rows[:, None] + columns[None, :]
    if HEAD_DIM == WIDE:
        k = tl.load(k_cache + offsets)
    else:
        k = tl.load(k_cache + offsets, mask=columns[None, :] < HEAD_DIM, other=0)
    k = as_floats(k, CODES, q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if CODES is not None:
        scale_offsets = blocks * scale_block_stride + inner * scale_slot_stride + kv_head
        scores *= tl.load(k_scales + scale_offsets)[None, :]
    if CAPPED:
        decay = tl.exp2(tl.abs(scores) * -cap_factor)
        size = (1.0 - decay) / (1.0 + decay)
        scores = tl.where(scores < 0, -size, size)
    whole = start + KEYS - 1 <= lowest
    if WINDOWED:
        whole &= start > highest - window
    if not whole:
        seen = keys[None, :] <= positions[:, None]
        if WINDOWED:
            seen &= keys[None, :] > positions[:, None] - window
        scores = tl.where(seen, scores, float("-inf"))

    new_peak = tl.maximum(peak, tl.ceil(tl.max(scores, 1) * factor))
    shares = tl.exp2(tl.fma(scores, factor, -new_peak[:, None]))
    shrink = power_of_two(peak - new_peak)
    total = total * shrink + tl.sum(shares, 1)
    sums = sums * shrink[:, None]

    if HEAD_DIM == WIDE:
        v = tl.load(v_cache + offsets)
    else:
        v = tl.load(v_cache + offsets, mask=columns[None, :] < HEAD_DIM, other=0)
    if CODES is not None:
        shares *= tl.load(v_scales + scale_offsets)[None, :]
        # A share times a scale may be too small for float16; codes are exact in bfloat16 as well.
        if q.dtype == tl.float16:
            v = as_floats(v, CODES, tl.bfloat16)
        else:
            v = as_floats(v, CODES, q.dtype)
    else:
        v = as_floats(v, CODES, q.dtype)
    sums = tl.dot(shares.to(v.dtype), v, sums, input_precision="ieee")
    return sums, new_peak, total


@triton.jit
def merge_partition(merged, merged_peak, merged_total, sums, peak, total):
    """Add the partition that follows; (merged, merged_peak, merged_total) with it."""
    new_peak = tl.maximum(merged_peak, peak)
    old = power_of_two(merged_peak - new_peak)
    new = power_of_two(peak - new_peak)
    merged = merged * old[:, None] + sums * new[:, None]
    return merged, new_peak, merged_total * old + total * new
