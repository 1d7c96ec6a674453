"""Parameters, histories and draws that the tests of the stateful samplers share."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from numpy.typing import NDArray

from sampler_cases import Logits
from triptych.kernels.cpu.sampler import Sampler as NativeSampler
from triptych.kernels.reference.sampler import Sampler as PlainSampler
from triptych.kernels.sampler_params import SamplerParams, SamplerProtocol, TokenLogprobs

MakeSampler = Callable[..., SamplerProtocol]
SAMPLERS: list[type[SamplerProtocol]] = [NativeSampler, PlainSampler]
BOTH = pytest.mark.parametrize("make", SAMPLERS, ids=["native", "plain"])


def draw_one(
    make: MakeSampler,
    row: Sequence[float] | Logits,
    params: SamplerParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    vocabulary: int | None = None,
) -> int:
    """The token that a sequence with these tokens draws from one row."""
    logits = np.array([row], np.float32)
    sampler = make(vocabulary or logits.shape[1])
    sampler.open(1, params, prompt, output)
    return int(sampler.draw(logits, [1], [0]).token_ids[0])


def draws(
    make: MakeSampler,
    row: Sequence[float] | Logits,
    params: SamplerParams,
    count: int,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
) -> NDArray[np.int32]:
    """Tokens of `count` sequences that differ in their seeds alone, all from one row."""
    logits = np.array([row], np.float32)
    sampler = make(logits.shape[1])
    for sequence in range(count):
        sampler.open(sequence, params._replace(seed=params.seed + sequence), prompt, output)
    return sampler.draw(logits, range(count), [0] * count).token_ids


def logprobs_of(
    make: MakeSampler,
    row: Sequence[float] | Logits,
    params: SamplerParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    *,
    processed: bool = True,
) -> dict[int, float]:
    """What the next token is drawn from (or the model's own distribution), by id."""
    logits = np.array([row], np.float32)
    sampler = make(logits.shape[1], processed_logprobs=processed)
    sampler.open(1, params._replace(logprobs=logits.shape[1]), prompt, output)
    drawn = sampler.draw(logits, [1], [0]).logprobs[0]
    return dict(zip(drawn.top_ids.tolist(), drawn.top_logprobs.tolist(), strict=True))


def assert_same_logprobs(ours: TokenLogprobs, reference: TokenLogprobs) -> None:
    """Ids and ranks the same; values to a float32's last place, where two `exp` may differ."""
    assert ours.rank == reference.rank
    np.testing.assert_array_equal(ours.top_ids, reference.top_ids)
    values = [ours.logprob, *ours.top_logprobs], [reference.logprob, *reference.top_logprobs]
    np.testing.assert_allclose(*values, rtol=2e-7, atol=2e-7)


def random_params(rng: np.random.Generator, vocabulary: int) -> SamplerParams:
    """Any mix of parameters, with every border value among them; each is off half the time."""

    def some(values: Sequence[Any], off: object) -> Any:
        return values[int(rng.integers(len(values)))] if rng.random() < 0.5 else off

    def ids(most: int) -> tuple[int, ...]:
        return tuple(rng.integers(-1, vocabulary + 2, rng.integers(0, most + 1)).tolist())

    bias = tuple((token, float(rng.choice([-100, -1, 0.5, 100]))) for token in sorted({*ids(5)}))
    return SamplerParams(
        temperature=some([0.0, 1e-40, 1e-4, 0.1, 0.7, 2.0, 100.0], 1.0),
        top_k=some([-1, 1, 2, 50, vocabulary // 2 + 1, vocabulary, 10**7, 2**40], 0),
        top_p=some([0.0, 1e-4, 0.1, 0.5, 0.9, 0.999], 1.0),
        min_p=some([0.01, 0.3, 1.0], 0.0),
        typical_p=some([0.0, 1e-4, 0.2, 0.5, 0.95], 1.0),
        top_n_sigma=some([0.01, 0.5, 1.0, 2.5], 0.0),
        repetition_penalty=some([0.5, 1.1, 1.5, 10.0], 1.0),
        presence_penalty=some([-2.0, 0.3, 2.0], 0.0),
        frequency_penalty=some([-1.0, 0.1, 1.5], 0.0),
        no_repeat_ngram_size=some([1, 2, 3, 8], 0),
        seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
        choice=int(rng.integers(0, 4)),
        logit_bias=some([bias], ()),
        allowed_token_ids=some([ids(6), ids(vocabulary)], None),
        bad_words=some([tuple((*ids(2), int(rng.integers(0, vocabulary))) for _ in range(4))], ()),
        masked_token_ids=some([ids(4)], ()),
        mask_until=some([1, 5, 100], 0),
        logprobs=some([0, 1, 5, 20, vocabulary], -1),
    )


def histories(vocabulary: int) -> st.SearchStrategy[list[int]]:
    """Token ids, now and then one that the tokenizer does not have."""
    return st.lists(st.integers(0, vocabulary), max_size=12)
