"""The C++ sampler gives the tokens and logprobs of the numpy one, whatever the parameters."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sampler_cases import random_logits, using_isa
from sampler_sequences import assert_same_logprobs, histories, random_params
from triptych.kernels import cpu
from triptych.kernels.cpu.sampler import Sampler
from triptych.kernels.reference.sampler import Sampler as PlainSampler
from triptych.kernels.sampler_params import LARGEST_VOCABULARY, Drawn, SamplerParams

SMALL = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1023, 1025, 4099]


def assert_same(ours: Drawn, reference: Drawn) -> None:
    np.testing.assert_array_equal(ours.token_ids, reference.token_ids)
    assert ours.token_ids.dtype == reference.token_ids.dtype == np.int32
    assert ours.logprobs.keys() == reference.logprobs.keys()
    for index, of_token in ours.logprobs.items():
        assert_same_logprobs(of_token, reference.logprobs[index])


@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("isa", cpu.supported_isas())
@pytest.mark.parametrize("vocabulary", SMALL)
def test_same_answers_over_a_few_steps(isa: str, vocabulary: int, processed: bool) -> None:
    rng = np.random.default_rng(vocabulary)
    samplers = [make(vocabulary, processed_logprobs=processed) for make in (Sampler, PlainSampler)]
    for sequence in range(16):
        params = random_params(rng, vocabulary)
        prompt = rng.integers(0, min(vocabulary, 8) + 1, rng.integers(0, 12)).tolist()
        for sampler in samplers:
            sampler.open(sequence, params, prompt, prompt[:2])
    for _ in range(4):
        logits = random_logits(rng, 9, vocabulary + 3)
        rows = rng.integers(0, 9, 16).tolist()
        with using_isa(isa):
            ours = samplers[0].draw(logits, range(16), rows)
        assert_same(ours, samplers[1].draw(logits, range(16), rows))
        drawn = [(i, token) for i, token in enumerate(ours.token_ids.tolist()) if token >= 0]
        for sampler in samplers:
            sampler.append([i for i, _ in drawn], [token for _, token in drawn])


@settings(max_examples=150, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32), prompt=histories(30), output=histories(30))
def test_same_answer_for_any_history(
    data: st.DataObject, seed: int, prompt: list[int], output: list[int]
) -> None:
    rng = np.random.default_rng(seed)
    logits = random_logits(rng, 1, 30)
    spoiled = data.draw(st.sampled_from([None, None, None, np.nan, np.inf, -np.inf]))
    if spoiled is not None:
        logits[0, data.draw(st.integers(0, 29))] = spoiled
    mask = rng.integers(0, 2**32, 1, dtype=np.uint32) if data.draw(st.booleans()) else None
    answers = []
    for make in (Sampler, PlainSampler):
        sampler = make(29, processed_logprobs=bool(seed % 2))
        sampler.open(7, random_params(np.random.default_rng(seed), 29), prompt, output)
        answers.append(sampler.draw(logits, [7], [0], [mask]))
    assert_same(*answers)


@pytest.mark.parametrize("vocabulary", [49152, 50257])
def test_same_answers_at_the_size_of_a_model(vocabulary: int) -> None:
    rng = np.random.default_rng(3)
    logits = random_logits(rng, 24, vocabulary)
    sequences = [random_params(rng, vocabulary)._replace(allowed_token_ids=None) for _ in range(24)]
    answers = []
    for processed in (False, True):
        plain = PlainSampler(vocabulary, processed_logprobs=processed)
        native = Sampler(vocabulary, processed_logprobs=processed)
        for i, params in enumerate(sequences):
            for sampler in (plain, native):
                sampler.open(i, params, [i, 5, 6, 7], [8, 9])
        expected = plain.draw(logits, range(24), range(24))
        for isa in cpu.supported_isas():
            with using_isa(isa):
                answers.append(native.draw(logits, range(24), range(24)))
            assert_same(answers[-1], expected)


def test_logprobs_have_the_same_bits_on_every_instruction_set() -> None:
    rng = np.random.default_rng(8)
    logits = random_logits(rng, 12, 5003)
    for processed in (False, True):
        sampler = Sampler(5003, processed_logprobs=processed)
        for i in range(12):
            sampler.open(i, random_params(rng, 5003)._replace(logprobs=40), [], [])
        answers = []
        for isa in cpu.supported_isas():
            with using_isa(isa):
                answers.append(sampler.draw(logits, range(12), range(12)).logprobs)
        for index, first in answers[0].items():
            for other in answers[1:]:
                assert other[index].logprob == first.logprob
                assert other[index].rank == first.rank
                np.testing.assert_array_equal(other[index].top_logprobs, first.top_logprobs)


@pytest.mark.parametrize("isa", cpu.supported_isas())
def test_scores_are_the_reference_s(isa: str) -> None:
    rng = np.random.default_rng(2)
    logits = random_logits(rng, 30, 700)
    logits[4, 0], logits[5, 699], logits[6] = np.nan, np.inf, -np.inf
    rows, tokens = list(range(30)), rng.integers(0, 690, 30).tolist()
    with using_isa(isa):
        ours = Sampler(690).score(logits, rows, tokens, 7)
    reference = PlainSampler(690).score(logits, rows, tokens, 7)
    for i, (mine, expected) in enumerate(zip(ours, reference, strict=True)):
        if i in (4, 6):
            assert mine is None
            assert expected is None
        else:
            assert mine is not None
            assert expected is not None
            assert_same_logprobs(mine, expected)


def test_the_largest_vocabulary() -> None:
    """A flat row has the most mass that there can be."""
    logits = np.zeros((1, LARGEST_VOCABULARY), np.float32)
    for params in (SamplerParams(top_p=0.5), SamplerParams(typical_p=0.5), SamplerParams()):
        answers = []
        for make in (Sampler, PlainSampler):
            sampler = make(LARGEST_VOCABULARY, processed_logprobs=True)
            sampler.open(1, params._replace(seed=4, logprobs=1), [], [])
            answers.append(sampler.draw(logits, [1], [0]))
        assert_same(*answers)
        kept = LARGEST_VOCABULARY * (0.5 if params.top_p < 1 else 1.0)
        assert answers[0].logprobs[0].logprob == pytest.approx(-np.log(kept), abs=1e-4)


def test_flat_rows_and_ties() -> None:
    """All in one bin, all equal; and rows with only two levels."""
    flat = np.zeros((1, 5000), np.float32)
    levels = np.where(np.arange(5000) % 3 == 0, np.float32(1), np.float32(0))[None]
    cases = [{"typical_p": 0.3}, {"typical_p": 0.9, "top_p": 0.5}, {"top_n_sigma": 0.5},
             {"top_n_sigma": 1.0, "top_p": 0.4}, {"top_k": 600, "typical_p": 0.5}]  # fmt: skip
    for logits in (flat, np.ascontiguousarray(levels)):
        for case in cases:
            for isa in cpu.supported_isas():
                answers = []
                for make in (Sampler, PlainSampler):
                    sampler = make(5000)
                    for i in range(8):
                        sampler.open(i, SamplerParams(seed=i, **case), [], [])  # type: ignore[arg-type]  # floats and an int
                    with using_isa(isa):
                        answers.append(sampler.draw(logits, range(8), [0] * 8))
                assert_same(*answers)
