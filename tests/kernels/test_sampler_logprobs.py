"""Logprobs that clients see: exact, finite, of the right tokens, and the same under any load."""

import math

import numpy as np
import pytest
import torch

from sampler_cases import random_logits
from sampler_sequences import BOTH, MakeSampler, logprobs_of, random_params
from triptych.kernels.cpu.sampler import Sampler
from triptych.kernels.sampler_params import NO_LOGPROBS, SamplerParams

TABLE = np.array([0.15, 0.4, 0.05, 0.3, 0.1])
LOGITS = np.log(TABLE).astype(np.float32)


@BOTH
@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
@pytest.mark.parametrize("vocabulary", [7, 1000, 49152])
def test_raw_logprobs_are_torch_s_log_softmax(
    make: MakeSampler, spread: float, vocabulary: int
) -> None:
    rng = np.random.default_rng(vocabulary)
    logits = (rng.standard_normal((6, vocabulary + 1)) * spread).astype(np.float32)
    logits[:, -1] = 1e3  # beyond the tokenizer: not in the distribution
    expected = torch.from_numpy(logits[:, :-1]).double().log_softmax(-1)
    sampler = make(vocabulary)
    params = SamplerParams(temperature=1.7, top_k=3, repetition_penalty=2.0, logprobs=20)
    for sequence in range(6):
        sampler.open(sequence, params, [0, 1], [2])
    drawn = sampler.draw(logits, range(6), range(6))
    assert drawn.logprobs.keys() == set(range(6))
    for i, of_token in drawn.logprobs.items():
        token = drawn.token_ids[i]
        top = expected[i].topk(min(20, vocabulary))
        assert of_token.top_ids.dtype == np.int32
        assert of_token.top_logprobs.dtype == np.float32
        assert of_token.top_ids.tolist() == top.indices.tolist()
        np.testing.assert_allclose(of_token.top_logprobs, top.values.numpy(), atol=1e-5)
        assert of_token.logprob == pytest.approx(float(expected[i, token]), abs=1e-5)
        assert of_token.rank == 1 + int((expected[i] > expected[i, token]).sum())
    tokens = rng.integers(0, vocabulary, 6).tolist()
    for i, scored in enumerate(sampler.score(logits, range(6), tokens, 3)):
        assert scored is not None
        assert scored.logprob == pytest.approx(float(expected[i, tokens[i]]), abs=1e-5)
        assert len(scored.top_ids) == 3


@BOTH
def test_how_many_are_reported(make: MakeSampler) -> None:
    """reported-faults R25: 0 is the drawn token alone; NO_LOGPROBS is nothing."""
    sampler = make(5)
    counts = [NO_LOGPROBS, 0, 1, 4, 5, 2**62]
    for sequence, count in enumerate(counts):
        sampler.open(sequence, SamplerParams(temperature=0.0, logprobs=count), [], [])
    drawn = sampler.draw(LOGITS[None], range(6), [0] * 6)
    assert drawn.logprobs.keys() == {1, 2, 3, 4, 5}
    assert [len(drawn.logprobs[i].top_ids) for i in range(1, 6)] == [0, 1, 4, 5, 5]
    for of_token in drawn.logprobs.values():
        assert of_token.logprob == pytest.approx(math.log(0.4), abs=1e-6)
        assert of_token.rank == 1
    assert drawn.logprobs[4].top_ids.tolist() == [1, 3, 0, 4, 2]


@BOTH
def test_equal_tokens(make: MakeSampler) -> None:
    """They share a rank, and the lowest ids are reported first."""
    row = np.array([[1.0, 3.0, 1.0, 3.0, -0.0, 0.0]], np.float32)
    scores = make(6).score(row, [0] * 6, range(6), 3)
    assert [score.rank for score in scores if score] == [3, 1, 3, 1, 5, 5]
    for score in scores:
        assert score is not None
        assert score.top_ids.tolist() == [1, 3, 0]


@BOTH
def test_processed_logprobs_are_of_what_is_drawn_from(make: MakeSampler) -> None:
    params = SamplerParams(temperature=0.5, top_k=3, logit_bias=((2, 3.0),))
    weights = TABLE * np.array([1, 1, math.e**3, 1, 1])
    kept = (weights[[2, 1, 3]]) ** 2
    ours = logprobs_of(make, LOGITS, params)
    assert list(ours) == [2, 1, 3]
    np.testing.assert_allclose(list(ours.values()), np.log(kept / kept.sum()), atol=1e-5)
    # A greedy row has no temperature and no filters, as in vLLM.
    greedy = logprobs_of(make, LOGITS, SamplerParams(temperature=0.0, top_k=2))
    np.testing.assert_allclose(list(greedy.values()), np.sort(LOGITS)[::-1], atol=1e-5)
    # Where typical_p has taken the most likely away, the others are the distribution.
    typical = logprobs_of(make, LOGITS, SamplerParams(typical_p=0.2))
    assert typical == {3: 0.0}
    raw = logprobs_of(make, LOGITS, params, processed=False)
    assert list(raw) == [1, 3, 0, 4, 2]


@BOTH
@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-12, 1.0])
@pytest.mark.parametrize("scale", [1e4, 1e30])
def test_never_an_infinity_nor_nan(
    make: MakeSampler, processed: bool, temperature: float, scale: float
) -> None:
    row = np.array([1.0, -3.0, -np.inf, 0.5], np.float32) * np.float32(scale)
    params = SamplerParams(temperature=temperature)
    ours = logprobs_of(make, row, params, processed=processed)
    assert list(ours) == [0, 3, 1], "what has no probability is left out"
    assert np.isfinite(list(ours.values())).all()
    assert ours[0] == 0.0
    score = make(4).score(row[None], [0], [2], 0)[0]
    assert score is not None
    assert score.rank == 4
    assert score.logprob == np.finfo(np.float32).min


@BOTH
def test_rows_that_are_not_finite(make: MakeSampler) -> None:
    logits = np.tile(LOGITS, (4, 1))
    logits[0, 2], logits[1, 0], logits[2] = np.nan, np.inf, -np.inf
    sampler = make(5)
    for sequence in range(4):
        sampler.open(sequence, SamplerParams(logprobs=2), [], [])
    drawn = sampler.draw(logits, range(4), range(4))
    assert drawn.token_ids[:3].tolist() == [-1, -1, -1]
    assert drawn.logprobs.keys() == {3}
    scores = sampler.score(logits, range(4), [1] * 4, 1)
    assert [score is None for score in scores] == [True, True, True, False]


@BOTH
def test_scores_refuse_what_is_not_in_the_vocabulary(make: MakeSampler) -> None:
    for token in (-1, 5):
        with pytest.raises(ValueError, match=f"token id {token} is not in the vocabulary"):
            make(5).score(LOGITS[None], [0], [token], 0)
    with pytest.raises(ValueError, match="top is negative"):
        make(5).score(LOGITS[None], [0], [0], -1)


def test_the_same_bits_alone_and_in_any_batch() -> None:
    rng = np.random.default_rng(12)
    logits = random_logits(rng, 10, 3000)
    for processed in (False, True):
        sampler = Sampler(3000, processed_logprobs=processed)
        for i in range(10):
            params = random_params(rng, 3000)._replace(logprobs=15)
            sampler.open(i, params, [1, 2, 3], [4])
        together = sampler.draw(logits, range(10), range(10))
        for _ in range(4):
            order = rng.permutation(10)
            mixed = sampler.draw(logits, order, order)
            np.testing.assert_array_equal(mixed.token_ids, together.token_ids[order])
            for place, i in enumerate(order.tolist()):
                alone = sampler.draw(logits[i : i + 1], [i], [0])
                for other in (mixed.logprobs.get(place), alone.logprobs.get(0)):
                    expected = together.logprobs.get(i)
                    if other is None or expected is None:
                        assert other is expected
                        continue
                    assert other[:2] == expected[:2]
                    np.testing.assert_array_equal(other.top_ids, expected.top_ids)
                    np.testing.assert_array_equal(other.top_logprobs, expected.top_logprobs)
