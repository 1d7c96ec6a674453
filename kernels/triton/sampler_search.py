"""Where top_k and top_p cut a row: exact thresholds by bisection over keys, without sorting.

Both ask for the smallest key v such that S(v) < bound, S(v) being how many ids, or how much of
their masses, have a key of v or above. It is narrowed down in PASSES launches, each with PIVOTS
pivots: integer sums, so that neither the order of adding nor the pieces of a row matter.
"""

import triton
import triton.language as tl

from triptych.kernels.triton.sampler_rows import (
    NO_KEY,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    distances,
    drawable,
    integer,
    key_of,
    key_of_packed,
    load_logits,
    masses,
    number,
    penalized,
    row_peak,
    value_of,
)

PASSES = 8  # 16^8 = 2^32: every key is reached
PIVOTS = 16
N_PIVOTS = tl.constexpr(PIVOTS)
N_PASSES = tl.constexpr(PASSES)
STATE = 4
N_STATE = tl.constexpr(STATE)
# Of a search's state: S is not below the bound at LOW, and is at HIGH, where it is SUM; the bound
# is TOTAL (times top_p).
LOW = tl.constexpr(0)
HIGH = tl.constexpr(1)
SUM = tl.constexpr(2)
TOTAL = tl.constexpr(3)


@triton.jit
def pivots_between(low, high):
    """PIVOTS keys in (low, high), int64, ascending, the first one low + 1."""
    return low + 1 + tl.arange(0, N_PIVOTS) * (high - low - 1) // N_PIVOTS


@triton.jit
def narrowed(states, sums, params, sample, step, MASS: tl.constexpr):
    """low, high, sum, total of a search after `step` passes (1 and up)."""
    place = (sample * 2 + MASS) * N_PASSES + step - 1
    low = tl.load(states + place * N_STATE + LOW)
    high = tl.load(states + place * N_STATE + HIGH)
    above = tl.load(states + place * N_STATE + SUM)
    total = tl.load(states + place * N_STATE + TOTAL)
    lanes = tl.arange(0, N_PIVOTS)
    found = above + tl.load(sums + place * N_PIVOTS + lanes)
    if MASS:
        if step == 1:
            total += tl.max(found, axis=0)  # all that is above `low`; the rest is there already
        share = number(params, sample, TOP_P).to(tl.float64)
        bound = share * total.to(tl.float64)
    else:
        bound = total.to(tl.float64)
    pivots = pivots_between(low, high)
    under = found.to(tl.float64) < bound
    new_high = tl.min(tl.where(under, pivots, high), axis=0)
    new_low = tl.max(tl.where(under, low, pivots), axis=0)
    new_sum = tl.max(tl.where(under, found, above), axis=0)
    return new_low, new_high, new_sum, total


@triton.jit
def uses_top_k(params, sample):
    """Whether top_k may cut."""
    return (integer(params, sample, TOP_K) > 0) & (number(params, sample, TEMPERATURE) > 0.0)


@triton.jit
def uses_top_p(params, sample):
    """Whether top_p may cut."""
    return (number(params, sample, TOP_P) < 1.0) & (number(params, sample, TEMPERATURE) > 0.0)


@triton.jit
def cut_by_top_k(states, sums, params, sample):
    """(key, equals): ids above the key are kept, and so many that have it, lowest ids first."""
    key = tl.full((), NO_KEY, tl.int32)
    equals = tl.full((), 0, tl.int64)
    if uses_top_k(params, sample):
        low, _, above, total = narrowed(states, sums, params, sample, N_PASSES, 0)
        key = low.to(tl.int32)
        # With fewer ids than top_k, `low` is the key of -inf, which nobody has that is kept.
        equals = tl.where(low > NO_KEY, total - above, 0)
    return key, equals


@triton.jit
def cut_by_top_p(states, sums, params, sample, packed):
    """(key, equals) as above, of top_k and top_p together."""
    key, equals = cut_by_top_k(states, sums, params, sample)
    if uses_top_p(params, sample):
        low, high, above, total = narrowed(states, sums, params, sample, N_PASSES, 1)
        bound = number(params, sample, TOP_P).to(tl.float64) * total.to(tl.float64)
        peak_key = key_of_packed(packed)
        peak = value_of(peak_key)
        inverse = 1.0 / number(params, sample, TEMPERATURE).to(tl.float64)
        new_key = tl.where(bound > 0.0, low, peak_key.to(tl.int64)).to(tl.int32)
        mass = masses(distances(value_of(new_key), peak, inverse))
        # The fewest equals, one at least, with which the bound is reached. No more than fit:
        # all masses of the largest vocabulary do.
        few = tl.full((), 0, tl.int64)
        many = (0x7FFFFFFFFFFFFFFF - above) // mass
        many = tl.minimum(many, 1 << 19)
        for _ in range(19):
            middle = (few + many) // 2
            under = (above + middle * mass).to(tl.float64) < bound
            few = tl.where(under, middle, few)
            many = tl.where(under, many, middle)
        taken = tl.where(bound > 0.0, many, 1)
        equals = tl.where(new_key == key, tl.minimum(equals, taken), taken)
        key = new_key
    return key, equals


@triton.jit
def _first_state(states, sums, params, sample, packed, MASS: tl.constexpr):
    """low, high, sum, total of a search before its first pass."""
    high = key_of_packed(packed).to(tl.int64) + 1
    above = tl.full((), 0, tl.int64)
    if MASS:
        key, equals = cut_by_top_k(states, sums, params, sample)
        peak = value_of(key_of_packed(packed))
        inverse = 1.0 / number(params, sample, TEMPERATURE).to(tl.float64)
        low = key.to(tl.int64)
        total = equals * masses(distances(value_of(key), peak, inverse))
    else:
        low = tl.full((), NO_KEY, tl.int64)
        total = integer(params, sample, TOP_K).to(tl.int64)
    return low, high, above, total


@triton.jit(do_not_specialize=["step"])
def search_kernel(
    logits, row_stride, vocabulary, rows, params, counts, peaks, states, sums, splits, step,
    SPLITS: tl.constexpr, PIECE: tl.constexpr, TILE: tl.constexpr, MASS: tl.constexpr,
):  # fmt: skip
    """A pass of a search over a piece of a sample's row."""
    sample = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.load(rows + sample)
    if MASS:
        wanted = uses_top_p(params, sample)
    else:
        wanted = uses_top_k(params, sample)
    if (row >= 0) & wanted:
        packed = row_peak(peaks, sample, splits, SPLITS)
        if drawable(packed):
            if step == 0:
                low, high, above, total = _first_state(states, sums, params, sample, packed, MASS)
            else:
                low, high, above, total = narrowed(states, sums, params, sample, step, MASS)
            place = (sample * 2 + MASS) * N_PASSES + step
            if split == 0:
                tl.store(states + place * N_STATE + LOW, low)
                tl.store(states + place * N_STATE + HIGH, high)
                tl.store(states + place * N_STATE + SUM, above)
                tl.store(states + place * N_STATE + TOTAL, total)
            if high - low > 1:
                _add_piece(
                    logits, row_stride, vocabulary, row, sample, split, params, counts,
                    packed, low, high, sums + place * N_PIVOTS, PIECE, TILE, MASS,
                )  # fmt: skip


@triton.jit
def _add_piece(
    logits, row_stride, vocabulary, row, sample, split, params, counts, packed, low, high, sums,
    PIECE: tl.constexpr, TILE: tl.constexpr, MASS: tl.constexpr,
):  # fmt: skip
    pivots = pivots_between(low, high).to(tl.int32)
    last = (high - 1).to(tl.int32)
    first = (low + 1).to(tl.int32)
    peak = value_of(key_of_packed(packed))
    inverse = 1.0 / number(params, sample, TEMPERATURE).to(tl.float64)
    lanes = tl.arange(0, TILE)
    changed = penalized(params, sample)
    if MASS:
        total = tl.zeros((N_PIVOTS, TILE), tl.int64)
    else:
        total = tl.zeros((N_PIVOTS, TILE), tl.int32)
    for start in range(0, tl.minimum(PIECE, vocabulary - split * PIECE), TILE):
        ids = split * PIECE + start + lanes
        within = ids < vocabulary
        x = load_logits(
            logits, row_stride, row, sample, ids, within, params, counts, vocabulary, changed
        )
        key = key_of(x)
        inside = (key >= first) & (key <= last)
        above = inside[None, :] & (key[None, :] >= pivots[:, None])
        if MASS:
            if tl.max(inside.to(tl.int32), axis=0) > 0:
                mass = masses(distances(x, peak, inverse))
                total += tl.where(above, mass[None, :], 0)
        else:
            total += above.to(tl.int32)
    tl.atomic_add(sums + tl.arange(0, N_PIVOTS), tl.sum(total.to(tl.int64), axis=1))
