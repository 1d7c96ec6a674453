"""What the sampler's kernels share: a sample's parameters, its logits, their order, their masses.

docs/sampling.md has the steps. `kernels.triton.sampler` has the order of the launches.
"""

import triton
import triton.language as tl

NUM_COLUMNS = 12  # engine_core.layout.SAMPLE_COLUMNS, which kernels do not import
TEMPERATURE = tl.constexpr(0)
TOP_P = tl.constexpr(1)
MIN_P = tl.constexpr(2)
REPETITION = tl.constexpr(3)
PRESENCE = tl.constexpr(4)
FREQUENCY = tl.constexpr(5)
TOP_K = tl.constexpr(6)
SEED_LOW = tl.constexpr(7)
SEED_HIGH = tl.constexpr(8)
CHOICE = tl.constexpr(9)
POSITION = tl.constexpr(10)
LOGPROBS = tl.constexpr(11)
COLUMNS = tl.constexpr(NUM_COLUMNS)

IN_PROMPT = tl.constexpr(1 << 30)
"""In a table of counts: the prompt has the id. Below it: how often the output has it."""
NO_KEY = tl.constexpr(-2139095041)
"""The key of -inf; every other number that may be drawn has a larger one."""
NO_PACKED = tl.constexpr(-0x8000000000000000)
"""Below the packed key of any number."""
BROKEN = tl.constexpr(0x7FFFFFFFFFFFFFFF)
"""As a packed peak: the row has a NaN or +inf."""


@triton.jit
def number(params, sample, COLUMN: tl.constexpr):
    """A parameter with a fraction, float32."""
    bits = tl.load(params + sample * COLUMNS + COLUMN)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def integer(params, sample, COLUMN: tl.constexpr):
    """A parameter without, int32."""
    return tl.load(params + sample * COLUMNS + COLUMN)


@triton.jit
def penalized(params, sample):
    """Whether the counts of a sample matter."""
    repetition = number(params, sample, REPETITION)
    presence = number(params, sample, PRESENCE)
    frequency = number(params, sample, FREQUENCY)
    return (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0)


@triton.jit
def load_logits(
    logits, row_stride, row, sample, ids, within, params, counts, vocabulary, changed
):  # fmt: skip
    """Logits of a tile of ids in float32, after penalties if `changed`; -inf outside. Each
    operation rounds once, so launches must not fuse multiplications and additions."""
    x = tl.load(logits + row.to(tl.int64) * row_stride + ids, mask=within, other=float("-inf"))
    x = x.to(tl.float32)
    if changed:
        seen = tl.load(counts + sample.to(tl.int64) * vocabulary + ids, mask=within, other=0)
        repetition = number(params, sample, REPETITION)
        x = tl.where(seen != 0, tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition), x)
        count = seen & (IN_PROMPT - 1)
        less = x - number(params, sample, FREQUENCY) * count.to(tl.float32)
        x = tl.where(count > 0, less - number(params, sample, PRESENCE), x)
    return x


@triton.jit
def key_of(x):
    """An int32 that orders float32 numbers as they are; both zeros have one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """The number of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def pack(key, ids):
    """An int64 that orders by key, and among equals by id, lowest first."""
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def key_of_packed(packed):
    """The key of a packed peak."""
    return (packed >> 32).to(tl.int32)


@triton.jit
def id_of_packed(packed):
    """The id of a packed peak."""
    return 0x7FFFFFFF - (packed & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def row_peak(peaks, sample, splits, SPLITS: tl.constexpr):
    """The packed peak of a sample: of all its pieces."""
    lanes = tl.arange(0, SPLITS)
    found = tl.load(peaks + sample * splits + lanes, mask=lanes < splits, other=NO_PACKED)
    return tl.max(found, axis=0)


@triton.jit
def drawable(packed):
    """Whether a row with this peak has something to draw, and nothing broken."""
    return (packed != BROKEN) & (key_of_packed(packed) > NO_KEY)


@triton.jit
def distances(x, peak, inverse):
    """Nats under the peak, float64."""
    return (peak.to(tl.float64) - x.to(tl.float64)) * inverse


@triton.jit
def masses(distance):
    """Fixed-point probabilities, int64: floor(2^44 exp(-distance))."""
    return (tl.exp(-distance) * 17592186044416.0).to(tl.int64)
