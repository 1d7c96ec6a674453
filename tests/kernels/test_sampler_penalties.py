"""Steps that change logits before the draw: against their formulas and Hugging Face (R17, R23)."""

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers.generation.logits_process import (
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from sampler_cases import chi_square_fits
from sampler_sequences import BOTH, MakeSampler, draw_one, draws, logprobs_of
from triptych.kernels.cpu.sampler import Sampler
from triptych.kernels.sampler_params import NO_TOKEN, SamplerParams

ROW = np.array([2.0, -1.0, 0.5, 0.0, -3.0, 1.0], np.float32)


def log_softmax(row: NDArray[np.float64]) -> NDArray[np.float64]:
    """In float64; rows with -inf too."""
    shifted = row - row.max()
    result: NDArray[np.float64] = shifted - math.log(np.exp(shifted).sum())
    return result


def assert_distribution(
    make: MakeSampler,
    expected: NDArray[np.float64],
    params: SamplerParams,
    prompt: list[int],
    output: list[int],
) -> None:
    """What is drawn from is the softmax of `expected`, a row of logits."""
    ours = logprobs_of(make, ROW, params, prompt, output)
    assert ours.keys() == set(np.flatnonzero(expected > -np.inf).tolist())
    for token, logprob in ours.items():
        assert logprob == pytest.approx(log_softmax(expected)[token], abs=1e-5)


@BOTH
def test_presence_and_frequency_count_the_output_only(make: MakeSampler) -> None:
    """reported-faults R23: the prompt has token 0 five times, the output has not."""
    prompt = [0] * 5
    for params in (SamplerParams(presence_penalty=1.0), SamplerParams(frequency_penalty=1.0)):
        assert_distribution(make, ROW.astype(np.float64), params, prompt, [])
    row = ROW.astype(np.float64)
    row[1] -= 1.5 * 2 + 0.7
    row[5] -= 1.5 * 1 + 0.7
    params = SamplerParams(presence_penalty=0.7, frequency_penalty=1.5)
    assert_distribution(make, row, params, prompt, [1, 5, 1])


@BOTH
def test_repetition_counts_prompt_and_output(make: MakeSampler) -> None:
    row = ROW.astype(np.float64)
    row[0] /= 2
    row[1] *= 2
    row[4] *= 2
    assert_distribution(make, row, SamplerParams(repetition_penalty=2.0), [0] * 5 + [1], [4, 4])


@BOTH
def test_repetition_comes_before_frequency_and_presence(make: MakeSampler) -> None:
    row = ROW.astype(np.float64)
    row[0] = row[0] / 2 - 0.5 * 2 - 0.25
    row[4] = row[4] * 2
    params = SamplerParams(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    assert_distribution(make, row, params, [4], [0, 0])


@BOTH
def test_bias_comes_before_penalties_and_after_the_allowed_ids(make: MakeSampler) -> None:
    row = ROW.astype(np.float64)
    row[1] = (row[1] + 3) / 2
    row[2] = -np.inf
    row[4] = -np.inf
    params = SamplerParams(
        repetition_penalty=2.0, logit_bias=((1, 3.0), (2, 100.0)), allowed_token_ids=(0, 1, 3, 5)
    )
    assert_distribution(make, row, params, [1], [])


@BOTH
def test_penalties_follow_the_tokens_that_are_appended(make: MakeSampler) -> None:
    """Step by step is the same as all at once, as after a preemption."""
    params = SamplerParams(
        frequency_penalty=0.5, repetition_penalty=1.2, no_repeat_ngram_size=3,
        bad_words=((1, 2, 3),), masked_token_ids=(5,), mask_until=3, logprobs=6,
    )  # fmt: skip
    sampler = make(6, processed_logprobs=True)
    sampler.open(1, params, [0, 1, 2], [])
    output: list[int] = []
    for token in (1, 2, 3, 3, 1, 2):
        sampler.open(2, params, [0, 1, 2], output)
        drawn = sampler.draw(ROW[None], [1, 2], [0, 0])
        assert drawn.token_ids[0] == drawn.token_ids[1]
        np.testing.assert_array_equal(drawn.logprobs[0].top_ids, drawn.logprobs[1].top_ids)
        np.testing.assert_array_equal(
            drawn.logprobs[0].top_logprobs, drawn.logprobs[1].top_logprobs
        )
        sampler.close(2)
        sampler.append([1], [token])
        output.append(token)


@pytest.mark.parametrize(
    ("params", "weights"),
    [
        (SamplerParams(presence_penalty=1.0), [0.5, 0.3 / math.e, 0.2 / math.e]),
        (SamplerParams(frequency_penalty=0.5), [0.5, 0.3 / math.e, 0.2 / math.sqrt(math.e)]),
        # All three logits are negative, so a doubled one is its probability squared.
        (SamplerParams(repetition_penalty=2.0), [0.25, 0.09, 0.04]),
        (SamplerParams(logit_bias=((0, -1.0),)), [0.5 / math.e, 0.3, 0.2]),
        (SamplerParams(allowed_token_ids=(0, 2)), [0.5, 0.0, 0.2]),
        (SamplerParams(bad_words=((1,), (0, 2))), [0.5, 0.0, 0.2]),
        (SamplerParams(bad_words=((2, 1, 0),)), [0.0, 0.3, 0.2]),
        (SamplerParams(no_repeat_ngram_size=2), [0.5, 0.0, 0.0]),
        (SamplerParams(masked_token_ids=(0,), mask_until=4), [0.0, 0.3, 0.2]),
        (SamplerParams(masked_token_ids=(0,), mask_until=3), [0.5, 0.3, 0.2]),
    ],
)
def test_distribution_in_closed_form(params: SamplerParams, weights: list[float]) -> None:
    """Prompt 0 1, output 1 2 1; a vocabulary of three with probabilities .5, .3, .2."""
    row = np.log([0.5, 0.3, 0.2])
    tokens = draws(Sampler, row.tolist(), params, 2000, prompt=[0, 1], output=[1, 2, 1])
    support = np.flatnonzero(weights)
    assert set(tokens.tolist()) == set(support.tolist())
    if len(support) > 1:
        counts = np.bincount(tokens, minlength=3)[support]
        assert chi_square_fits(counts, np.array(weights)[support])


@BOTH
def test_bias_forces_and_removes(make: MakeSampler) -> None:
    """reported-faults R17."""
    assert set(draws(make, ROW, SamplerParams(logit_bias=((4, 100.0),)), 100).tolist()) == {4}
    assert 0 not in draws(make, ROW, SamplerParams(logit_bias=((0, -100.0),)), 300).tolist()


@BOTH
def test_ids_outside_the_vocabulary_have_no_effect(make: MakeSampler) -> None:
    odd = (-1, 6, 2**31 - 1, 2**32 + 1)
    for params in (
        SamplerParams(logit_bias=tuple((token, 100.0) for token in odd)),
        SamplerParams(bad_words=tuple((token,) for token in odd)),
        SamplerParams(masked_token_ids=odd, mask_until=9),
        SamplerParams(repetition_penalty=2.0, frequency_penalty=1.0, no_repeat_ngram_size=1),
    ):
        assert_distribution(make, ROW.astype(np.float64), params, list(odd), list(odd[:1]))
    assert draw_one(make, ROW, SamplerParams(allowed_token_ids=odd)) == NO_TOKEN


@BOTH
def test_nothing_left_to_draw(make: MakeSampler) -> None:
    for temperature in (0.0, 1.0):
        for params in (
            SamplerParams(allowed_token_ids=()),
            SamplerParams(allowed_token_ids=(1,), bad_words=((1,),)),
            SamplerParams(masked_token_ids=(0, 1, 2, 3, 4, 5), mask_until=1),
            SamplerParams(allowed_token_ids=(2,), logprobs=2, no_repeat_ngram_size=1),
        ):
            tempered = params._replace(temperature=temperature)
            assert draw_one(make, ROW, tempered, prompt=[2]) == NO_TOKEN


@BOTH
def test_a_grammar_mask(make: MakeSampler) -> None:
    sampler = make(70, processed_logprobs=True)
    sampler.open(1, SamplerParams(logprobs=70, bad_words=((64,),)), [], [])
    mask = np.zeros(3, np.uint32)
    for token in (0, 33, 64, 69):
        mask[token // 32] |= np.uint32(1 << token % 32)
    logits = np.zeros((1, 80), np.float32)
    assert set(sampler.draw(logits, [1], [0], [mask]).logprobs[0].top_ids.tolist()) == {0, 33, 69}
    assert len(sampler.draw(logits, [1], [0], [None]).logprobs[0].top_ids) == 69
    with pytest.raises(ValueError, match="words"):
        sampler.draw(logits, [1], [0], [mask[:2]])
    with pytest.raises(TypeError, match="uint32"):
        sampler.draw(logits, [1], [0], [mask.astype(np.int64)])
    with pytest.raises(ValueError, match="as many allowed_masks"):
        sampler.draw(logits, [1], [0], [])


@BOTH
@pytest.mark.parametrize("seed", range(20))
def test_hugging_face_s_processors(make: MakeSampler, seed: int) -> None:
    """Random histories over few ids, so that n-grams and words do come back."""
    rng = np.random.default_rng(seed)
    row = (rng.standard_normal(12) * 3).astype(np.float32)
    history: list[int] = rng.integers(0, 4, rng.integers(1, 25)).tolist()
    cut = int(rng.integers(0, len(history) + 1))
    words = [rng.integers(0, 4, rng.integers(1, 4)).tolist() for _ in range(5)]
    size = int(rng.integers(1, 5))
    for params, processor, prompt, output in (
        (SamplerParams(repetition_penalty=1.3), RepetitionPenaltyLogitsProcessor(1.3),
         history[:cut], history[cut:]),
        (SamplerParams(no_repeat_ngram_size=size), NoRepeatNGramLogitsProcessor(size),
         history[:cut], history[cut:]),
        # Hugging Face looks for words in the prompt too; we do as vLLM does.
        (SamplerParams(bad_words=tuple(map(tuple, words))), NoBadWordsLogitsProcessor(words),
         [], history),
    ):  # fmt: skip
        ids = torch.tensor([history])
        scores = processor(ids, torch.from_numpy(row)[None].clone())[0].double().numpy()
        ours = logprobs_of(make, row, params, prompt, output)
        assert ours.keys() == set(np.flatnonzero(scores > -np.inf).tolist())
        for token, logprob in ours.items():
            assert logprob == pytest.approx(log_softmax(scores)[token], abs=1e-5)


@BOTH
def test_bad_words_are_looked_for_in_the_output_only(make: MakeSampler) -> None:
    params = SamplerParams(temperature=0.0, bad_words=((1, 0),))
    assert draw_one(make, ROW, params, prompt=[1]) == 0
    assert draw_one(make, ROW, params, prompt=[3], output=[1]) == 5
    assert draw_one(make, ROW, params, prompt=[3], output=[1, 2]) == 0
