"""The launches of the sampler around its searches: counts, peaks, ties, scores, tokens."""

import triton
import triton.language as tl

from triptych.kernels.triton.philox import gumbel
from triptych.kernels.triton.sampler_rows import (
    BROKEN,
    CHOICE,
    IN_PROMPT,
    MIN_P,
    NO_KEY,
    NO_PACKED,
    POSITION,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    distances,
    drawable,
    id_of_packed,
    integer,
    key_of,
    key_of_packed,
    load_logits,
    number,
    pack,
    penalized,
    row_peak,
    value_of,
)
from triptych.kernels.triton.sampler_search import (
    N_PASSES,
    N_PIVOTS,
    cut_by_top_p,
    uses_top_k,
    uses_top_p,
)

# No noise makes up for more nats than this: 36.74 at most, against -3.61 of the likeliest id.
REACH = tl.constexpr(41.0)


@triton.jit
def count_kernel(
    rows, params, history_starts, history_prompts, history, counts, vocabulary, programs,
    BLOCK: tl.constexpr, CLEAR: tl.constexpr,
):  # fmt: skip
    """Enter a sample's history into its counts; or, CLEAR, set them to 0 again."""
    sample = tl.program_id(0)
    if (tl.load(rows + sample) >= 0) & penalized(params, sample):
        start = tl.load(history_starts + sample)
        end = tl.load(history_starts + sample + 1)
        output = start + tl.load(history_prompts + sample)
        table = counts + sample.to(tl.int64) * vocabulary
        first = start + tl.program_id(1) * BLOCK
        while first < end:
            places = first + tl.arange(0, BLOCK)
            ids = tl.load(history + places, mask=places < end, other=-1)
            within = (ids >= 0) & (ids < vocabulary)
            if CLEAR:
                tl.store(table + ids, tl.zeros_like(ids), mask=within)
            else:
                in_prompt = places < output
                marks = tl.full(ids.shape, IN_PROMPT, tl.int32)
                tl.atomic_or(table + ids, marks, mask=within & in_prompt)
                ones = tl.full(ids.shape, 1, tl.int32)
                tl.atomic_add(table + ids, ones, mask=within & (places >= output))
            first += programs * BLOCK


@triton.jit
def peaks_kernel(
    logits, row_stride, vocabulary, rows, params, counts, peaks, sums, splits,
    PIECE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The largest logit of a piece, and what is broken in it; makes the searches' sums 0."""
    sample = tl.program_id(0)
    split = tl.program_id(1)
    if split == 0:
        lanes = tl.arange(0, 2 * N_PASSES * N_PIVOTS)
        zeros = tl.zeros((2 * N_PASSES * N_PIVOTS,), tl.int64)
        tl.store(sums + sample * (2 * N_PASSES * N_PIVOTS) + lanes, zeros)
    row = tl.load(rows + sample)
    if row >= 0:
        changed = penalized(params, sample)
        best = tl.full((TILE,), NO_PACKED, tl.int64)
        for start in range(0, tl.minimum(PIECE, vocabulary - split * PIECE), TILE):
            ids = split * PIECE + start + tl.arange(0, TILE)
            within = ids < vocabulary
            x = load_logits(
                logits, row_stride, row, sample, ids, within, params, counts, vocabulary, changed
            )
            # NaN is not below infinity either.
            packed = tl.where(x < float("inf"), pack(key_of(x), ids), BROKEN)
            best = tl.maximum(best, packed)
        tl.store(peaks + sample * splits + split, tl.max(best, axis=0))


@triton.jit
def ties_kernel(
    logits, row_stride, vocabulary, rows, params, counts, peaks, states, sums, cuts, ties, splits,
    SPLITS: tl.constexpr, PIECE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Where a row is cut, (key, equals) of cuts; and how many ids of a piece have that key."""
    sample = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.load(rows + sample)
    if (row >= 0) & (uses_top_k(params, sample) | uses_top_p(params, sample)):
        packed = row_peak(peaks, sample, splits, SPLITS)
        if drawable(packed):
            cut, equals = cut_by_top_p(states, sums, params, sample, packed)
            if split == 0:
                tl.store(cuts + sample * 2, cut.to(tl.int64))
                tl.store(cuts + sample * 2 + 1, equals)
            changed = penalized(params, sample)
            found = tl.zeros((TILE,), tl.int32)
            for start in range(0, tl.minimum(PIECE, vocabulary - split * PIECE), TILE):
                ids = split * PIECE + start + tl.arange(0, TILE)
                x = load_logits(
                    logits, row_stride, row, sample, ids, ids < vocabulary, params, counts,
                    vocabulary, changed,
                )  # fmt: skip
                found += (key_of(x) == cut).to(tl.int32)
            tl.store(ties + sample * splits + split, tl.sum(found, axis=0))


@triton.jit
def _cut_of(params, sample, cuts, ties, split, splits, SPLITS: tl.constexpr):
    """key, how many equals are left to be kept when the piece begins, whether that is some only."""
    cut = tl.full((), NO_KEY, tl.int32)
    left = tl.full((), 0, tl.int64)
    some = tl.full((), 0, tl.int1)
    if uses_top_k(params, sample) | uses_top_p(params, sample):
        cut = tl.load(cuts + sample * 2).to(tl.int32)
        equals = tl.load(cuts + sample * 2 + 1)
        lanes = tl.arange(0, SPLITS)
        of_pieces = tl.load(ties + sample * splits + lanes, mask=lanes < splits, other=0)
        of_pieces = of_pieces.to(tl.int64)
        some = tl.sum(of_pieces, axis=0) > equals
        left = equals - tl.sum(tl.where(lanes < split, of_pieces, 0), axis=0)
    return cut, left, some


@triton.jit
def scores_kernel(
    logits, row_stride, vocabulary, rows, params, counts, peaks, cuts, ties, scores, best_ids,
    splits,
    SPLITS: tl.constexpr, PIECE: tl.constexpr, QUADS: tl.constexpr,
):  # fmt: skip
    """The largest of noise minus distance in a piece, over what the filters keep, and its id."""
    sample = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.load(rows + sample)
    temperature = number(params, sample, TEMPERATURE)
    if (row >= 0) & (temperature > 0.0):
        packed = row_peak(peaks, sample, splits, SPLITS)
        if drawable(packed):
            peak = value_of(key_of_packed(packed))
            inverse = 1.0 / temperature.to(tl.float64)
            cut, left, some = _cut_of(params, sample, cuts, ties, split, splits, SPLITS)
            min_p = number(params, sample, MIN_P).to(tl.float64)
            farthest = tl.where(min_p > 0.0, -tl.log(tl.where(min_p > 0.0, min_p, 1.0)), REACH)
            farthest = tl.minimum(farthest, REACH)
            key_low = integer(params, sample, SEED_LOW).to(tl.uint32, bitcast=True).to(tl.uint64)
            key_high = integer(params, sample, SEED_HIGH).to(tl.uint32, bitcast=True).to(tl.uint64)
            choice = integer(params, sample, CHOICE).to(tl.uint32, bitcast=True).to(tl.uint64)
            position = integer(params, sample, POSITION).to(tl.uint32, bitcast=True).to(tl.uint64)
            changed = penalized(params, sample)
            best = tl.full((), float("-inf"), tl.float64)
            best_id = tl.full((), -1, tl.int32)
            for start in range(0, tl.minimum(PIECE, vocabulary - split * PIECE), 4 * QUADS):
                quads = (split * PIECE + start) // 4 + tl.arange(0, QUADS)
                ids = quads[:, None] * 4 + tl.arange(0, 4)[None, :]
                x = load_logits(
                    logits, row_stride, row, sample, ids, ids < vocabulary, params, counts,
                    vocabulary, changed,
                )  # fmt: skip
                key = key_of(x)
                distance = distances(x, peak, inverse)
                kept = (key > NO_KEY) & (distance <= farthest)
                equal = (key == cut) & (key > NO_KEY)
                if some:
                    ones = equal.to(tl.int64)
                    of_quads = tl.sum(ones, axis=1)
                    before = (tl.cumsum(of_quads, axis=0) - of_quads)[:, None]
                    before += tl.cumsum(ones, axis=1) - ones
                    equal = equal & (before < left)
                    left -= tl.sum(of_quads, axis=0)
                kept = kept & ((key > cut) | equal)
                if tl.max(tl.max(kept.to(tl.int32), axis=1), axis=0) > 0:
                    noise = gumbel(quads.to(tl.uint64), choice, position, key_low, key_high)
                    score = tl.where(kept, noise - distance, float("-inf"))
                    top = tl.max(tl.max(score, axis=1), axis=0)
                    if top > best:
                        best = top
                        lowest = tl.where(score == top, ids, 0x7FFFFFFF)
                        best_id = tl.min(tl.min(lowest, axis=1), axis=0)
            tl.store(scores + sample * splits + split, best)
            tl.store(best_ids + sample * splits + split, best_id)


@triton.jit
def tokens_kernel(rows, params, peaks, scores, best_ids, out, splits, SPLITS: tl.constexpr):
    """The token of each sample from what its pieces found."""
    sample = tl.program_id(0)
    token = tl.full((), -1, tl.int32)
    if tl.load(rows + sample) >= 0:
        packed = row_peak(peaks, sample, splits, SPLITS)
        if drawable(packed):
            token = id_of_packed(packed)
            if number(params, sample, TEMPERATURE) > 0.0:
                lanes = tl.arange(0, SPLITS)
                within = lanes < splits
                found = sample * splits + lanes
                score = tl.load(scores + found, mask=within, other=float("-inf"))
                ids = tl.load(best_ids + found, mask=within, other=-1)
                top = tl.max(score, axis=0)
                token = tl.min(tl.where(score == top, ids, 0x7FFFFFFF), axis=0)
    tl.store(out + sample, token)
