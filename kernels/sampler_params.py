"""What a sampler knows of a sequence, and what it answers. Shared by both samplers.

Knows nothing of requests. `kernels.cpu.sampler.Sampler` (C++) and its twin in Python,
`kernels.reference.sampler.Sampler`, have one contract, `SamplerProtocol`, and give the same tokens.
docs/sampling.md has the order of operations.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

NO_LOGPROBS = -1
NO_TOKEN = -1
LARGEST_VOCABULARY = 2**19 - 1
"""So many fixed-point probabilities of 2^44 at most still add up within 63 bits."""

Integers = Sequence[int] | NDArray[np.int32] | NDArray[np.int64]
"""A list, a tuple, an array.array or a numpy array."""


class SamplerParams(NamedTuple):
    """Of one sequence. Values are checked by whoever takes requests in; bad ones are a bug.

    temperature 0 is greedy; top_k 0 or -1, top_p 1, min_p 0, typical_p 1, top_n_sigma 0,
    repetition_penalty 1, presence_penalty 0, frequency_penalty 0, no_repeat_ngram_size 0 are off.
    Numbers with a fraction are taken as float32. `logit_bias` ascends by id.
    `allowed_token_ids` None allows all. A bad word is a sequence of ids whose last one may not
    follow the others. `masked_token_ids` cannot be drawn before `mask_until` output tokens (the
    stop ids, until min_tokens). `logprobs` is how many most likely tokens are reported beside the
    drawn one, 0 for that one alone, NO_LOGPROBS for nothing. Ids outside the vocabulary have no
    effect anywhere.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    seed: int = 0
    choice: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    masked_token_ids: tuple[int, ...] = ()
    mask_until: int = 0
    logprobs: int = NO_LOGPROBS


class TokenLogprobs(NamedTuple):
    """Natural logarithms of probabilities at one position, at least -FLT_MAX and at most 0.

    `rank` is 1 for the most likely token; equal ones count as behind. `top_ids` int32 [k] and
    `top_logprobs` float32 [k]: the k most likely, most likely first, lowest id among equals; fewer
    than asked for where fewer have any probability (a logit above -inf).
    """

    logprob: float
    rank: int
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]


class Drawn(NamedTuple):
    """`token_ids` int32 [samples], NO_TOKEN where logits are not finite or nothing may be drawn.

    `logprobs`: of the samples whose sequence asks for them, by index; none for NO_TOKEN.
    """

    token_ids: NDArray[np.int32]
    logprobs: dict[int, TokenLogprobs]


class SamplerProtocol(Protocol):
    """The samplers' contract. A sequence is open while it runs. KeyError for one that is not.

    One thread at a time.
    """

    def __init__(self, vocabulary_size: int, *, processed_logprobs: bool = False) -> None:
        """Ids at or above `vocabulary_size` are never drawn nor counted in a distribution.

        `processed_logprobs`: logprobs are of what is drawn from (all steps applied), not of the
        model's own logits. Raises ValueError for a size outside
        1..LARGEST_VOCABULARY.
        """

    def open(
        self,
        sequence_id: int,
        params: SamplerParams,
        prompt_ids: Integers,
        output_ids: Integers,
    ) -> None:
        """A sequence begins, or goes on, with these tokens.

        Raises ValueError for one that is open and for parameters that have no meaning.
        """

    def append(self, sequence_ids: Integers, token_ids: Integers) -> None:
        """One more output token for each. Nothing happens where one of them is not open."""

    def close(self, sequence_id: int) -> None:
        """Forget a sequence."""

    @property
    def open_sequences(self) -> int:
        """How many are open."""

    def draw(
        self,
        logits: NDArray[np.float32],
        sequence_ids: Integers,
        logits_rows: Integers,
        allowed_masks: Sequence[NDArray[np.uint32] | None] | None = None,
    ) -> Drawn:
        """Draw a token for each sample: for sequence_ids[i] from row logits_rows[i].

        `logits`: float32 [rows, >= vocabulary_size], C-contiguous, may be read-only; read in place.
        Several samples may share a row. `allowed_masks`: per sample, uint32 words of which bit
        id % 32 of word id / 32 is set where a grammar lets the id follow; None allows all. Raises
        TypeError and ValueError for other arrays.
        """

    def score(
        self,
        logits: NDArray[np.float32],
        logits_rows: Integers,
        token_ids: Integers,
        top: int,
    ) -> list[TokenLogprobs | None]:
        """Logprobs of given tokens by the model's own logits: for prompt_logprobs.

        None where the row is not finite. Raises ValueError for a token outside the vocabulary.
        """


def check(params: SamplerParams) -> None:
    """Raise ValueError, naming the field, for values that have no meaning."""
    for field, low, high in (
        ("temperature", 0.0, math.inf),
        ("top_p", 0.0, 1.0),
        ("min_p", 0.0, 1.0),
        ("typical_p", 0.0, 1.0),
        ("top_n_sigma", 0.0, math.inf),
        ("presence_penalty", -math.inf, math.inf),
        ("frequency_penalty", -math.inf, math.inf),
    ):
        value = getattr(params, field)
        # Written so that NaN fails: every comparison with NaN is false.
        if not (math.isfinite(value) and low <= value <= high):
            raise ValueError(f"{field} {value} is not finite and within {low} and {high}")
    if not 0.0 < params.repetition_penalty < math.inf:
        raise ValueError(
            f"repetition_penalty {params.repetition_penalty} is not finite and above 0"
        )
    for field, least, bits in (
        ("no_repeat_ngram_size", 0, 63),
        ("mask_until", 0, 63),
        ("seed", 0, 64),
        ("choice", 0, 32),
        ("top_k", -1, 63),
        ("logprobs", NO_LOGPROBS, 63),
    ):
        if not least <= getattr(params, field) < 2**bits:
            raise ValueError(f"{field} {getattr(params, field)} is not within {least} and 2^{bits}")
    if not all(math.isfinite(bias) for _, bias in params.logit_bias):
        raise ValueError("a logit_bias is not finite")
    if not all(params.bad_words):
        raise ValueError("a bad word is empty")
