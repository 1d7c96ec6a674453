"""The ops of a forward pass as contracts: one name in every place that implements them.

An implementation of op X lives in `reference/X.py` (plain torch, the meaning), `cpu/`, `triton/`;
its test is `tests/kernels/test_ops_X.py`. The tolerance of an op stands here once, and is used by
tests, benchmarks and by whoever decides whether a faster kernel is right.
"""

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """|value - truth| <= absolute + relative * |truth|, the truth computed in float64."""

    absolute: float
    relative: float


@dataclass(frozen=True, slots=True)
class Op:
    """A contract: what goes in and out, and how near the truth the result must be by dtype.

    `inputs` and `output` are shapes in the op's own letters, as its reference names them.
    """

    name: str
    inputs: str
    output: str
    float32: Tolerance
    bfloat16: Tolerance

    def tolerance(self, dtype: Dtype) -> Tolerance:
        """The bound for results of a dtype."""
        match dtype:
            case "float32":
                return self.float32
            case "bfloat16":
                return self.bfloat16


# bfloat16 keeps 8 bits: one rounding of the result is 2^-9 relative, and inputs are taken as given.
_ONE_ROUNDING = Tolerance(absolute=1e-6, relative=2**-8)
_EXACT = Tolerance(0.0, 0.0)

RMS_NORM = Op(
    "rms_norm", "x [T, H], weight f32 [H], epsilon; add_rms_norm: residual [T, H] += x first",
    "[T, H]",
    Tolerance(1e-6, 2e-6), _ONE_ROUNDING,
)  # fmt: skip
LAYER_NORM = Op(
    "layer_norm", "x [T, H], weight f32 [H], bias f32 [H], epsilon", "[T, H]",
    Tolerance(2e-6, 5e-6), _ONE_ROUNDING,
)  # fmt: skip
ROTARY = Op(
    "rotary", "x [T, N, D], cos f32 [T, D/2], sin f32 [T, D/2]", "[T, N, D]",
    Tolerance(1e-6, 1e-6), Tolerance(2e-6, 2**-8),
)  # fmt: skip
SILU_GATE = Op(
    "silu_gate", "gate_up [T, 2F]; gelu_tanh_gate: the same", "[T, F]",
    Tolerance(1e-6, 2e-6), _ONE_ROUNDING,
)  # fmt: skip
PAGED_ATTENTION = Op(
    "paged_attention",
    "q [T, N, D], k_cache and v_cache [blocks, block_size, M, D], block_tables i32 [R, B], "
    "row_starts i32 [R + 1], kv_lengths i32 [R], scale, window, soft_cap",
    "[T, N, D]",
    Tolerance(2e-6, 1e-5), Tolerance(2e-2, 2**-6),
)  # fmt: skip

EMBEDDING = Op(
    "embedding", "token_ids i32 [T], table [rows, H], first id of the table", "[T, H]",
    _EXACT, _EXACT,
)  # fmt: skip
TOKEN_SOURCES = Op(
    "token_sources", "token_ids i32 [T] (changed in place), previous i32 [S]", "[T]",
    _EXACT, _EXACT,
)  # fmt: skip
SAMPLER = Op(
    "sampler", "logits [L, V], columns of S samples, vocabulary_size", "i32 [S]",
    _EXACT, _EXACT,
)  # fmt: skip
SAMPLER_LOGPROBS = Op(
    "sampler_logprobs", "logits [L, V], columns of S samples, vocabulary_size, token_ids i32 [S]",
    "logprobs f32 [S], ranks i32 [S], top_counts i32 [S], top_ids i32 [S, k], top_logprobs [S, k]",
    Tolerance(1e-37, 3e-7), Tolerance(1e-37, 3e-7),
)  # fmt: skip

# Sums of many products: bounds are for products of about 1, thousands of columns.
MATMUL = Op(
    "matmul",
    "x [T, K], weight [O, K] (or quantised), bias [O]; float32 sums, in an order that depends on "
    "(O, K) alone",
    "[T, O]",
    Tolerance(2e-3, 1e-5), Tolerance(2e-3, 2**-8),
)  # fmt: skip

OPS: dict[str, Op] = {
    op.name: op
    for op in (
        RMS_NORM,
        LAYER_NORM,
        ROTARY,
        SILU_GATE,
        PAGED_ATTENTION,
        EMBEDDING,
        TOKEN_SOURCES,
        SAMPLER,
        SAMPLER_LOGPROBS,
        MATMUL,
    )
}
"""All contracts by name."""
