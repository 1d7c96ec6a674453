"""Attention of few queries a sequence, split along the keys: the kernels.

Launchers: `paged_attention`. A sequence's keys are cut into partitions of a fixed length, so what
is computed for it never depends on the batch (Flash-Decoding with a fixed split). An item is a
partition that has keys to see. `split_kernel` computes items, `merge_kernel` adds up those of a
query. Items are numbered without gaps over all sequences: programs share them evenly, none is idle
on account of one that could have been longer, and the grid is always the same.
"""

import triton
import triton.language as tl

from triptych.kernels.triton.attention_tiles import (
    NOTHING,
    VARYING,
    attend_keys,
    blocks_of,
    power_of_two,
)

UNROLLED = tl.constexpr(16)
"""Items whose loads are under way at once while they are merged."""
PEAKS = tl.constexpr(128)
"""Items whose maxima are read at once."""


@triton.jit
def count_items(
    row_starts, kv_lengths, num_rows, window,
    FEW: tl.constexpr, ROW_SLOTS: tl.constexpr, PARTITION: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """(rows [ROW_SLOTS], items of each, results of each, sums of both up to and with each).

    A result is what an item gives for a query. Rows of more than FEW queries have none, nor have
    those without keys. Without row_starts each row has one query.
    """
    rows = tl.arange(0, ROW_SLOTS)
    lengths = tl.load(kv_lengths + rows, mask=rows < num_rows, other=0)
    items = (lengths + PARTITION - 1) // PARTITION
    if row_starts is None:
        if WINDOWED:
            items -= tl.maximum(lengths - window, 0) // PARTITION
        results = items
        item_ends = tl.cumsum(items, 0)
        result_ends = item_ends
    else:
        begins = tl.load(row_starts + rows, mask=rows < num_rows, other=0)
        queries = tl.load(row_starts + rows + 1, mask=rows < num_rows, other=0) - begins
        if WINDOWED:
            items -= tl.maximum(lengths - queries + 1 - window, 0) // PARTITION
        items = tl.where((queries > 0) & (queries <= FEW), items, 0)
        results = items * queries
        item_ends = tl.cumsum(items, 0)
        result_ends = tl.cumsum(results, 0)
    return rows, items, results, item_ends, result_ends


@triton.jit(**VARYING)
def split_kernel(
    q, k_cache, v_cache, k_scales, v_scales, block_tables, row_starts, kv_lengths,
    sums_out, stats_out,
    num_rows, capacity, num_kv_heads,
    q_token_stride, q_head_stride, table_stride,
    block_stride, slot_stride, head_stride, scale_block_stride, scale_slot_stride,
    factor, cap_factor, window,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDE: tl.constexpr,
    KEYS: tl.constexpr, PARTITION: tl.constexpr, BLOCK_SIZE: tl.constexpr, CODES: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, FLOAT32: tl.constexpr,
    FEW: tl.constexpr, ROW_SLOTS: tl.constexpr,
):  # fmt: skip
    """A program: every so manieth (item, key-value head, slice); a slice is ROWS (query, head)s.

    FEW queries fill one slice, unless one query fills several. sums_out float32 [capacity, N,
    HEAD_DIM], stats_out float32 [capacity, N, 2] (maximum, total): of results, by row, item, query.
    """
    SLICES: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    rows, items, results, item_ends, result_ends = count_items(
        row_starts, kv_lengths, num_rows, window, FEW, ROW_SLOTS, PARTITION, WINDOWED
    )
    # Sequences whose results do not fit are for the launcher to compute otherwise.
    num_items = tl.max(tl.where(result_ends <= capacity, item_ends, 0))
    slices = num_kv_heads * SLICES
    columns = tl.arange(0, WIDE)
    for work in range(tl.program_id(0), num_items * slices, tl.num_programs(0)):
        item = work // slices
        kv_head = work % slices // SLICES
        row = tl.sum((item_ends <= item).to(tl.int32))
        own = rows == row
        items_to_end = tl.sum(tl.where(own, item_ends, 0)) - item
        length = tl.load(kv_lengths + row)
        partition = (length + PARTITION - 1) // PARTITION - items_to_end
        if row_starts is None:
            begin = row
            num_queries = 1
            place = item
        else:
            begin = tl.load(row_starts + row)
            num_queries = tl.load(row_starts + row + 1) - begin
            place = tl.sum(tl.where(own, result_ends, 0)) - items_to_end * num_queries
        lowest = length - num_queries
        first_key = partition * PARTITION
        if WINDOWED:
            first_key = tl.maximum(first_key, tl.maximum(lowest + 1 - window, 0) // KEYS * KEYS)

        pairs = work % SLICES * ROWS + tl.arange(0, ROWS)
        given = pairs < num_queries * GROUP
        queries = tl.minimum(pairs // GROUP, num_queries - 1)
        heads = kv_head * GROUP + pairs % GROUP
        mask = given[:, None] & (columns[None, :] < HEAD_DIM)
        queried = (begin + queries).to(tl.int64) * q_token_stride + heads * q_head_stride
        q_tile = tl.load(q + queried[:, None] + columns[None, :], mask=mask, other=0)
        if FLOAT32:
            q_tile = q_tile.to(tl.float32)

        sums = tl.zeros([ROWS, WIDE], tl.float32)
        peak = tl.full([ROWS], NOTHING, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        table = block_tables + row.to(tl.int64) * table_stride
        blocks = blocks_of(table, first_key, length, KEYS, BLOCK_SIZE)
        for start in range(first_key, tl.minimum((partition + 1) * PARTITION, length), KEYS):
            sums, peak, total = attend_keys(
                q_tile, sums, peak, total,
                start, length, lowest + queries, lowest, length - 1,
                blocks, k_cache, v_cache, k_scales, v_scales, kv_head,
                block_stride, slot_stride, head_stride, scale_block_stride, scale_slot_stride,
                factor, cap_factor, window,
                HEAD_DIM, WIDE, KEYS, BLOCK_SIZE, CODES, WINDOWED, CAPPED,
            )  # fmt: skip
            blocks = blocks_of(table, start + KEYS, length, KEYS, BLOCK_SIZE)
        places = (place + queries).to(tl.int64) * (num_kv_heads * GROUP) + heads
        tl.store(sums_out + places[:, None] * HEAD_DIM + columns[None, :], sums, mask=mask)
        tl.store(stats_out + places * 2, peak, mask=given)
        tl.store(stats_out + places * 2 + 1, total, mask=given)


@triton.jit(**VARYING)
def merge_kernel(
    sums_in, stats_in, row_starts, kv_lengths, out,
    num_rows, capacity, num_heads, out_token_stride, out_head_stride, window,
    HEAD_DIM: tl.constexpr, WIDE: tl.constexpr, PARTITION: tl.constexpr, WINDOWED: tl.constexpr,
    FEW: tl.constexpr, ROW_SLOTS: tl.constexpr,
):  # fmt: skip
    """A program: a head of one of FEW queries of a sequence. As `prefill_kernel` adds them up.

    Rescaling by powers of two commutes with rounding, so the largest maximum may be found first
    and the loads need not wait for one another. Without row_starts, sequences of no keys get 0.
    """
    row = tl.program_id(0) // FEW
    query = tl.program_id(0) % FEW
    head = tl.program_id(1)
    rows, items, results, _, result_ends = count_items(
        row_starts, kv_lengths, num_rows, window, FEW, ROW_SLOTS, PARTITION, WINDOWED
    )
    own = rows == row
    end = tl.sum(tl.where(own, result_ends, 0))
    num_items = tl.sum(tl.where(own, items, 0))
    if row_starts is None:
        token = row
        num_queries = 1
        wanted = end <= capacity
    else:
        token = tl.load(row_starts + row)
        num_queries = tl.load(row_starts + row + 1) - token
        token += query
        wanted = (end <= capacity) & (num_items > 0) & (query < num_queries)
    if wanted:
        begin = end - num_items * num_queries + query
        peak = NOTHING
        for first in range(0, num_items, PEAKS):
            steps = first + tl.arange(0, PEAKS)
            places = (begin + steps * num_queries).to(tl.int64) * num_heads + head
            peaks = tl.load(stats_in + places * 2, mask=steps < num_items, other=NOTHING)
            peak = tl.maximum(peak, tl.max(peaks))

        columns = tl.arange(0, WIDE)
        merged = tl.zeros([WIDE], tl.float32)
        total = 0.0
        for first in range(0, num_items, UNROLLED):
            for step in tl.static_range(UNROLLED):
                there = first + step < num_items
                place = begin + (first + step) * num_queries
                place = place.to(tl.int64) * num_heads + head
                own_peak = tl.load(stats_in + place * 2, mask=there, other=NOTHING)
                own_total = tl.load(stats_in + place * 2 + 1, mask=there, other=0.0)
                sums = tl.load(
                    sums_in + place * HEAD_DIM + columns,
                    mask=there & (columns < HEAD_DIM),
                    other=0.0,
                )
                share = power_of_two(own_peak - peak)
                merged += sums * share
                total += own_total * share
        share = 1.0 / tl.where(total == 0, 1.0, total)
        written = token.to(tl.int64) * out_token_stride + head * out_head_stride + columns
        result = (merged * share).to(out.dtype.element_ty)
        tl.store(out + written, result, mask=columns < HEAD_DIM)
