"""The device plan on the emulated device against transformers, on the same random weights."""

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
from triptych.services.executor.device.backend import DeviceBackend
from triptych.services.runtime.model_files import resolve_model

TOLERANCE = 1e-4
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "gqa_6_2": ("llama", {}),
    "gqa_3_1_wide_heads": (
        "llama",
        {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32},
    ),
    "no_gqa_tied": ("llama", {"num_key_value_heads": 6, "tie_word_embeddings": True}),
    "llama3_rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "linear_rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "gelu_tanh": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "mistral_window": ("mistral", {"sliding_window": 5}),
    "qwen2": ("qwen2", {}),
}
OPTIONS = BackendOptions(
    device="emulated", block_size=4, kv_cache_memory=1 << 21, threads=1,
    max_num_seqs=8, max_num_batched_tokens=64,
)  # fmt: skip


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


@pytest.mark.parametrize(("kind", "tolerance"), [("F32", 1e-4), ("Q8_0", 0.1)])
def test_a_gguf_twin(kind: str, tolerance: float, tmp_path: Path) -> None:
    sizes: dict[str, object] = {"hidden_size": 64, "intermediate_size": 96}
    model = tiny_model("llama", {**sizes, "num_attention_heads": 4})
    path = tmp_path / "model.gguf"
    write_gguf(model, path, type_of=lambda _: kind)
    driver = StepDriver(open_backend(resolve_model(str(path)), OPTIONS))
    tokens = tokens_of(20)
    np.testing.assert_allclose(
        driver.run(tokens), reference_logits(model, tokens)[-1], atol=tolerance
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [("int8", 0.05), ("fp8", 0.4)])
def test_a_cache_of_bytes(dtype: str, tolerance: float, tmp_path: Path) -> None:
    model = tiny_model("llama", {})
    save(model, tmp_path)
    options = BackendOptions(
        device="emulated", block_size=4, kv_cache_memory=1 << 20,
        kv_cache_dtype="int8" if dtype == "int8" else "fp8", max_num_seqs=4,
    )  # fmt: skip
    backend = open_backend(resolve_model(str(tmp_path)), options)
    assert isinstance(backend, DeviceBackend)
    assert backend.facts.kv_cache_dtype == dtype
    tokens = tokens_of(33)
    driver, sequence = StepDriver(backend), DrivenSequence()
    driver.step([(sequence, tokens[:32])])
    got = driver.step([(sequence, tokens[32:])])[0]
    error = np.abs(got - reference_logits(model, tokens)[-1]).max()
    assert 1e-6 < error < tolerance


def test_bfloat16(tmp_path: Path) -> None:
    model = tiny_model("llama", {})
    save(model, tmp_path)
    options = BackendOptions(
        device="emulated", dtype="bfloat16", block_size=4, kv_cache_memory=1 << 20, max_num_seqs=4
    )
    backend = open_backend(resolve_model(str(tmp_path)), options)
    tokens = tokens_of(20)
    expected = reference_logits(model, tokens)[-1]
    np.testing.assert_allclose(StepDriver(backend).run(tokens), expected, atol=0.15)


def test_nan_of_one_sequence_stays_its_own(tmp_path: Path) -> None:
    """Token 5's embedding is NaN: its sequence's logits are NaN, its neighbours' and its blocks'
    next owner's are right."""
    model = tiny_model("llama", {})
    clean = [token for token in tokens_of(14, seed=3) if token != 5]
    expected = reference_logits(model, clean)[-1]
    with torch.no_grad():
        model.get_parameter("model.embed_tokens.weight")[5] = float("nan")
    save(model, tmp_path)
    driver = StepDriver(open_backend(resolve_model(str(tmp_path)), OPTIONS))
    poisoned, neighbour = DrivenSequence(), DrivenSequence()
    logits = driver.step([(poisoned, [5] * 11), (neighbour, clean[:-1])])
    assert np.isnan(logits[0]).all()
    logits = driver.step([(poisoned, [1]), (neighbour, clean[-1:])])
    assert np.isnan(logits[0]).all()
    np.testing.assert_allclose(logits[1], expected, atol=TOLERANCE)
    driver.release(poisoned)
    successor = DrivenSequence()
    for token in clean[:-1]:
        driver.step([(successor, [token])])
    got = driver.step([(successor, clean[-1:])])[0]
    np.testing.assert_allclose(got, expected, atol=TOLERANCE)
