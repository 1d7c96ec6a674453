"""Beam search's bookkeeping against transformers' generate, over random tables and tiny models."""

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from transformers_beams import assert_same_beams, transformers_beams
from triptych.engine_core.beam_search import BeamSearch, Candidates
from triptych.engine_core.sampling_params import BeamParams, EarlyStopping

VOCABULARY = 23


def tiny_llama(seed: int) -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(30.0)  # far from flat: ties would be anybody's
    return model


def search(
    model: transformers.LlamaForCausalLM,
    prompt: list[int],
    params: BeamParams,
    most: int,
    stops: list[int],
    least: int,
) -> list[tuple[list[int], float]]:  # fmt: skip
    """Our search over the model's own logits."""
    beams = BeamSearch(params, most, stops, least)
    while not beams.done:
        found: list[Candidates] = []
        for beam in beams.running:
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *beam.tokens]])).logits[0, -1]
            top = logits.log_softmax(-1).topk(min(beams.candidates_wanted, VOCABULARY))
            found.append((top.indices.tolist(), top.values.tolist()))
        beams.advance(found)
    return [(list(each.tokens), each.score) for each in beams.best(params.width)]


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    width=st.integers(2, 5),
    most=st.integers(1, 9),
    penalty=st.sampled_from([0.0, 1.0, 2.0, -1.0, 0.6]),
    stopping=st.sampled_from(["true", "false", "never"]),
    stops=st.lists(st.integers(1, VOCABULARY - 1), max_size=2, unique=True),
    least=st.sampled_from([0, 0, 1, 3]),
)
def test_the_hypotheses_are_those_of_transformers(
    seed: int,
    width: int,
    most: int,
    penalty: float,
    stopping: EarlyStopping,
    stops: list[int],
    least: int,
) -> None:
    model = tiny_llama(seed)
    prompt = [1 + (seed * 7 + i * 5) % (VOCABULARY - 1) for i in range(1 + seed % 6)]
    params = BeamParams(width=width, length_penalty=penalty, early_stopping=stopping)
    least = min(least, most)
    ours = search(model, prompt, params, most, stops, least)
    reference = transformers_beams(model, prompt, params, most, stops, least)
    assert_same_beams(ours, reference, stops)


def test_a_search_that_cannot_be_extended_is_over() -> None:
    search = BeamSearch(BeamParams(width=2), max_tokens=8, stop_token_ids=[0, 1])
    assert search.advance([([0, 1], [-0.1, -2.0])]) == []
    assert search.done
    assert [each.tokens for each in search.best(2)] == [(0,), (1,)]


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_best_gives_what_there_is(count: int) -> None:
    search = BeamSearch(BeamParams(width=2), max_tokens=1, stop_token_ids=[])
    search.advance([([3, 4, 5], [-1.0, -2.0, -3.0])])
    assert len(search.best(count)) == min(count, 2)
