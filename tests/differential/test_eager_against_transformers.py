"""The eager plan against transformers on the same random weights: logits to 1e-4 in float32."""

from pathlib import Path

import numpy as np
import pytest
import torch

from logits_checks import (
    Pair,
    check_chunks,
    check_decode,
    check_mixed_batches,
    tokens_of,
)
from step_driver import DrivenSequence, StepDriver
from tiny_models import LLAMA3_ROPE, reference_logits, save, tiny_model, write_gguf
from triptych.services.executor.backend import Backend, BackendOptions, open_backend
from triptych.services.executor.model_config import Rope
from triptych.services.executor.rope_frequencies import inverse_frequencies
from triptych.services.runtime.model_files import resolve_model

TOLERANCE = 1e-4
BLOCK = 4

MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "gqa_6_2": ("llama", {}),
    "gqa_3_1_wide_heads": (
        "llama",
        {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32},
    ),
    "gqa_7_1_narrow_heads": (
        "llama",
        {"hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 6},
    ),
    "no_gqa_tied": ("llama", {"num_key_value_heads": 6, "tie_word_embeddings": True}),
    "llama3_rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "linear_rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "gelu": ("llama", {"hidden_act": "gelu"}),
    "mistral_window": ("mistral", {"sliding_window": 5}),
    "qwen2": ("qwen2", {}),
    "gpt2_tied": ("gpt2", {}),
    "gpt2_untied": ("gpt2", {"tie_word_embeddings": False, "n_inner": 40}),
}
OPTIONS = BackendOptions(plan="eager", block_size=BLOCK, kv_cache_memory=1 << 21, threads=1)


@pytest.fixture(scope="module", params=MODELS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[torch.nn.Module, Backend]:
    family, overrides = MODELS[request.param]
    model = tiny_model(family, overrides)
    folder = tmp_path_factory.mktemp("model")
    save(model, folder)
    return model, open_backend(resolve_model(str(folder)), OPTIONS)


def test_whole_prefill_then_decode(pair: Pair) -> None:
    check_decode(pair, TOLERANCE)


def test_chunks_at_random_points(pair: Pair) -> None:
    check_chunks(pair, TOLERANCE)


def test_mixed_batches(pair: Pair) -> None:
    check_mixed_batches(pair, TOLERANCE)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32}),
        ("llama", {"attention_bias": True, "tie_word_embeddings": True}),
        ("qwen2", {}),
        ("gpt2", {}),
        ("gpt2", {"tie_word_embeddings": False}),
    ],
)
def test_gguf_twin(family: str, overrides: dict[str, object], tmp_path: Path) -> None:
    model = tiny_model(family, overrides)
    if family == "llama" and overrides.get("attention_bias"):
        assert "model.layers.0.self_attn.o_proj.bias" in model.state_dict()
    write_gguf(model, tmp_path / "twin.gguf")
    backend = open_backend(resolve_model(str(tmp_path / "twin.gguf")), OPTIONS)
    tokens = tokens_of(20)
    got = StepDriver(backend).run(tokens)
    np.testing.assert_allclose(got, reference_logits(model, tokens)[-1], atol=TOLERANCE)


def test_gguf_rope_factors(tmp_path: Path) -> None:
    """llama.cpp's converter stores llama3 scaling as one divisor per frequency."""
    model = tiny_model("llama", {"rope_parameters": LLAMA3_ROPE})
    plain = inverse_frequencies(Rope(10000.0), 8)
    scaled = inverse_frequencies(Rope(10000.0, "llama3", 8.0, 1.0, 4.0, 32), 8)
    assert not np.array_equal(plain, scaled)
    write_gguf(model, tmp_path / "twin.gguf", plain / scaled)
    backend = open_backend(resolve_model(str(tmp_path / "twin.gguf")), OPTIONS)
    tokens = tokens_of(60)
    got = StepDriver(backend).run(tokens)
    np.testing.assert_allclose(got, reference_logits(model, tokens)[-1], atol=TOLERANCE)


def test_bfloat16_is_near(tmp_path: Path) -> None:
    model = tiny_model("llama", {})
    save(model, tmp_path)
    options = BackendOptions(dtype="bfloat16", block_size=BLOCK, kv_cache_memory=1 << 20, threads=1)
    backend = open_backend(resolve_model(str(tmp_path)), options)
    assert backend.facts.weight_bytes < 2.1 * backend.facts.parameters
    driver, sequence = StepDriver(backend), DrivenSequence()
    tokens = tokens_of(24)
    expected = reference_logits(model, tokens)
    for at, chunk in ((19, tokens[:20]), (20, tokens[20:21]), (23, tokens[21:])):
        got = driver.step([(sequence, chunk)])[0]
        assert np.abs(got - expected[at]).max() < 0.02 * np.abs(expected[at]).max() + 0.05


def test_large_hidden_states_stay_finite(tmp_path: Path) -> None:
    """Embedding x 1e5: beyond float16, well within float32 and bfloat16."""
    model = tiny_model("llama", {})
    with torch.no_grad():
        model.get_parameter("model.embed_tokens.weight").mul_(1e5)
    save(model, tmp_path)
    tokens = tokens_of(16)
    expected = reference_logits(model, tokens)[-1]
    files = resolve_model(str(tmp_path))
    got = StepDriver(open_backend(files, OPTIONS)).run(tokens)
    np.testing.assert_allclose(got, expected, atol=TOLERANCE)
    narrow = BackendOptions(dtype="bfloat16", block_size=BLOCK, kv_cache_memory=1 << 20)
    got = StepDriver(open_backend(files, narrow)).run(tokens)
    assert np.abs(got - expected).max() < 0.05 * np.abs(expected).max() + 0.05


def test_a_nan_weight_reaches_the_logits_and_no_other_sequence(tmp_path: Path) -> None:
    """Token 5's embedding is NaN: its sequence's logits are NaN, its neighbours' and its blocks'
    next owner's are right."""
    model = tiny_model("llama", {})
    clean = tokens_of(14, seed=3)
    clean = [token for token in clean if token != 5]
    expected = reference_logits(model, clean)[-1]
    with torch.no_grad():
        model.get_parameter("model.embed_tokens.weight")[5] = float("nan")
    save(model, tmp_path)
    driver = StepDriver(open_backend(resolve_model(str(tmp_path)), OPTIONS))
    poisoned, neighbour = DrivenSequence(), DrivenSequence()
    logits = driver.step([(poisoned, [5] * 11), (neighbour, clean[:-1])])
    assert np.isnan(logits[0]).all()
    assert np.isfinite(logits[1]).all()
    logits = driver.step([(poisoned, [1]), (neighbour, clean[-1:])])
    assert np.isnan(logits[0]).all()
    np.testing.assert_allclose(logits[1], expected, atol=TOLERANCE)
    driver.release(poisoned)
    successor = DrivenSequence()
    for token in clean[:-1]:
        driver.step([(successor, [token])])
    got = driver.step([(successor, clean[-1:])])[0]
    np.testing.assert_allclose(got, expected, atol=TOLERANCE)
