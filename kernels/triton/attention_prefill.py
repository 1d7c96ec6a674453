"""Attention of many queries a sequence: the kernel.

Launcher: `paged_attention.prefill_attention`.
"""

import triton
import triton.language as tl

from triptych.kernels.triton.attention_split import count_items
from triptych.kernels.triton.attention_tiles import (
    NOTHING,
    VARYING,
    attend_keys,
    blocks_of,
    merge_partition,
)

ROW_CHUNK = tl.constexpr(128)
"""Sequences that are looked through at once for a tile's own."""


@triton.jit
def find_row(row_starts, num_rows, tile, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Whose tile it is: row r's are row_starts[r] * GROUP // ROWS + r and on.

    That is enough for all of its pairs, and the host need not know how the tokens are divided.
    """
    row = -1
    for chunk in range(0, num_rows, ROW_CHUNK):
        rows = chunk + tl.arange(0, ROW_CHUNK)
        starts = tl.load(row_starts + rows, mask=rows < num_rows, other=0)
        row += tl.sum(((rows < num_rows) & (starts * GROUP // ROWS + rows <= tile)).to(tl.int32))
    return row


@triton.jit(**VARYING)
def prefill_kernel(
    q, k_cache, v_cache, k_scales, v_scales, block_tables, row_starts, kv_lengths, out,
    num_rows, capacity, q_token_stride, q_head_stride, out_token_stride, out_head_stride,
    table_stride,
    block_stride, slot_stride, head_stride, scale_block_stride, scale_slot_stride,
    factor, cap_factor, window,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDE: tl.constexpr,
    KEYS: tl.constexpr, PARTITION: tl.constexpr, BLOCK_SIZE: tl.constexpr, CODES: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, FLOAT32: tl.constexpr,
    FEW: tl.constexpr, ROW_SLOTS: tl.constexpr,
):  # fmt: skip
    """A program: ROWS (query, head) pairs of a sequence and key-value head, in order of queries.

    With FEW, only sequences that `split_kernel` leaves out, called with the same arguments. Without
    row_starts each row has one query.
    """
    # Later tiles of a prompt see more keys: long ones first, so that no long one is left last.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    if row_starts is None:
        SLICES: tl.constexpr = (GROUP + ROWS - 1) // ROWS
        row = tile // SLICES
        begin = row
        num_queries = 1
        first_pair = tile % SLICES * ROWS
    else:
        row = find_row(row_starts, num_rows, tile, GROUP, ROWS)
        begin = tl.load(row_starts + row)
        num_queries = tl.load(row_starts + row + 1) - begin
        first_pair = (tile - (begin * GROUP // ROWS + row)) * ROWS
    wanted = first_pair < num_queries * GROUP
    if FEW:
        rows, items, _, _, result_ends = count_items(
            row_starts, kv_lengths, num_rows, window, FEW, ROW_SLOTS, PARTITION, WINDOWED
        )
        own = rows == row
        fits = tl.sum(tl.where(own, result_ends, 0)) <= capacity
        wanted &= (tl.sum(tl.where(own, items, 0)) == 0) | (not fits)
    if wanted:
        length = tl.load(kv_lengths + row)
        pairs = first_pair + tl.arange(0, ROWS)
        given = pairs < num_queries * GROUP
        queries = tl.minimum(pairs // GROUP, num_queries - 1)
        positions = length - num_queries + queries
        lowest = length - num_queries + first_pair // GROUP
        highest = (
            length - num_queries + tl.minimum((first_pair + ROWS - 1) // GROUP, num_queries - 1)
        )

        columns = tl.arange(0, WIDE)
        mask = given[:, None] & (columns[None, :] < HEAD_DIM)
        tokens = (begin + queries).to(tl.int64)
        heads = kv_head * GROUP + pairs % GROUP
        queried = (tokens * q_token_stride + heads * q_head_stride)[:, None] + columns[None, :]
        q_tile = tl.load(q + queried, mask=mask, other=0)

        if FLOAT32:
            q_tile = q_tile.to(tl.float32)
        sums = tl.zeros([ROWS, WIDE], tl.float32)
        peak = tl.full([ROWS], NOTHING, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        merged, merged_peak, merged_total = sums, peak, total
        first_key = 0
        if WINDOWED:
            first_key = tl.maximum(lowest - window + 1, 0) // KEYS * KEYS
        table = block_tables + row.to(tl.int64) * table_stride
        blocks = blocks_of(table, first_key, length, KEYS, BLOCK_SIZE)
        for start in range(first_key, highest + 1, KEYS):
            sums, peak, total = attend_keys(
                q_tile, sums, peak, total,
                start, length, positions, lowest, highest,
                blocks, k_cache, v_cache, k_scales, v_scales, kv_head,
                block_stride, slot_stride, head_stride, scale_block_stride, scale_slot_stride,
                factor, cap_factor, window,
                HEAD_DIM, WIDE, KEYS, BLOCK_SIZE, CODES, WINDOWED, CAPPED,
            )  # fmt: skip
            blocks = blocks_of(table, start + KEYS, length, KEYS, BLOCK_SIZE)
            if (start + KEYS) % PARTITION == 0:
                merged, merged_peak, merged_total = merge_partition(
                    merged, merged_peak, merged_total, sums, peak, total
                )
                sums = tl.zeros([ROWS, WIDE], tl.float32)
                peak = tl.full([ROWS], NOTHING, tl.float32)
                total = tl.zeros([ROWS], tl.float32)
        # What is left of the last partition; where nothing is, this changes nothing.
        merged, merged_peak, merged_total = merge_partition(
            merged, merged_peak, merged_total, sums, peak, total
        )
        share = 1.0 / tl.where(merged_total == 0, 1.0, merged_total)
        result = (merged * share[:, None]).to(out.dtype.element_ty)
        written = (tokens * out_token_stride + heads * out_head_stride)[:, None] + columns[None, :]
        tl.store(out + written, result, mask=mask)
