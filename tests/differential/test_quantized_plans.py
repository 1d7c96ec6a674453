"""Quantised folders: exact weights, the plans against each other and against transformers."""

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from quantized_folders import SIZES, Layer, Scheme, write_quantized
from step_driver import DrivenSequence, StepDriver
from tiny_models import reference_logits
from triptych.kernels.cpu import _cpu
from triptych.services.executor.activation_precision import ActivationDtype
from triptych.services.executor.backend import Backend, BackendOptions, open_backend
from triptych.services.executor.models import build_network
from triptych.services.executor.native_plan import NativeBackend
from triptych.services.executor.packed_weights import (
    anonymous_memory,
    pack_weights,
    parts_of,
    places_of,
    plan_weights,
    total_bytes,
    why_not_packed,
)
from triptych.services.executor.safetensors_raw import SafetensorsRawWeights
from triptych.services.executor.safetensors_weights import SafetensorsWeights
from triptych.services.runtime.model_files import resolve_model

Floats = NDArray[np.float32]

BF16 = torch.bfloat16
NATIVE = (
    Scheme("gptq"),
    Scheme("gptq", group=128, symmetric=True),
    Scheme("gptq", group=-1),
    Scheme("gptq", bits=8),
    Scheme("gptq", bits=8, group=128, symmetric=True),
    Scheme("gptq_v2", group=64),
    Scheme("awq", group=64),
    Scheme("awq", group=-1, skip=("lm_head", "layers.0.mlp", "k_proj")),
    Scheme("packed", symmetric=True, scale_dtype=BF16),
    Scheme("packed", group=128),
    Scheme("packed", group=-1, symmetric=True),
    Scheme("packed", bits=8, group=64, symmetric=True, scale_dtype=BF16),
    Scheme("int8", bits=8, group=-1, symmetric=True, scale_dtype=BF16),
    Scheme("int8", bits=8, group=32),
    Scheme("gptq", group=32, skip=()),  # a quantised head
)
SHUFFLED = (
    Scheme("gptq", shuffle=True),
    Scheme("gptq_v2", bits=8, group=64, shuffle=True),
    Scheme("packed", shuffle=True),
    Scheme("gptq", shuffle=True, skip=("lm_head", "self_attn", "gate_proj", "up_proj")),
)


Written = tuple[Path, torch.nn.Module, dict[str, Layer]]


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Scheme], Written]:
    """Writes each scheme's folder once: folder, model with dequantised weights, layers."""

    @functools.cache
    def written(scheme: Scheme) -> Written:
        folder = tmp_path_factory.mktemp(scheme.name)
        return folder, *write_quantized(folder, scheme)

    return written


def name_of(scheme: Scheme) -> str:
    return scheme.name


def opened(folder: Path, plan: str, activations: ActivationDtype = "int16") -> Backend:
    options = BackendOptions(
        plan="native" if plan == "native" else "eager" if plan == "eager" else "auto",
        kv_cache_memory=1 << 21,
        kv_cache_dtype="float32",
        activation_dtype=activations,
        threads=2,
    )
    return open_backend(resolve_model(str(folder)), options)


def steps(backend: Backend, tokens: list[int]) -> Floats:
    """Logits of a prompt, and of decodes beside another prompt."""
    driver = StepDriver(backend)
    first, second = DrivenSequence(), DrivenSequence()
    out = [driver.step([(first, tokens[:40])])]
    for at in range(40, 44):
        out.append(driver.step([(first, tokens[at : at + 1]), (second, tokens[at - 40 : at - 37])]))
    return np.concatenate(out)


def greedy(backend: Backend, prompt: list[int], count: int) -> list[int]:
    driver, sequence = StepDriver(backend), DrivenSequence()
    out: list[int] = []
    fed = prompt
    for _ in range(count):
        out.append(int(driver.step([(sequence, fed)])[0].argmax()))
        fed = out[-1:]
    return out


def tokens_of(length: int, seed: int = 0) -> list[int]:
    return [int(value) for value in np.random.default_rng(seed).integers(0, 96, length)]


@pytest.mark.parametrize("scheme", NATIVE + SHUFFLED, ids=name_of)
def test_eager_weights_are_exact(scheme: Scheme, write: Callable[[Scheme], Written]) -> None:
    folder, model, layers = write(scheme)
    source = SafetensorsWeights(folder)
    network = build_network(source.config, torch.float32, source.rope_factors())
    parameters = network.parameters()
    source.load(parameters, lambda done, total: None)
    state = model.state_dict()
    assert len(layers) > 1
    for name, got in parameters.items():
        assert torch.equal(got, state[name]), name


@pytest.mark.parametrize("scheme", NATIVE, ids=name_of)
def test_packed_weights_are_exact(scheme: Scheme, write: Callable[[Scheme], Written]) -> None:
    """Never dequantised: as small as the codes, and equal to them times their scales."""
    folder, model, layers = write(scheme)
    source = SafetensorsRawWeights(folder)
    parts = parts_of(source.config)
    assert why_not_packed(parts, source) is None
    places = places_of(parts, source)
    memory = anonymous_memory(total_bytes(places))
    pack_weights(places, source, memory, 2, lambda done, total: None)
    packed = plan_weights(places, memory)
    state = model.state_dict()
    for place in places:
        value = packed[place.part.name]
        want = state[place.part.parameter].numpy()
        got = _cpu.unpack_matrix(value) if isinstance(value, tuple) else value
        assert np.array_equal(got, want), place.part.name
        if place.part.parameter.removesuffix(".weight") in layers:
            rows, columns = want.shape
            groups = 1 if scheme.group == -1 else columns // scheme.group
            assert place.num_bytes == rows * (columns * scheme.bits // 8 + groups * 4)


@pytest.mark.parametrize("scheme", NATIVE + SHUFFLED, ids=name_of)
def test_native_is_near_eager(scheme: Scheme, write: Callable[[Scheme], Written]) -> None:
    folder, _, _ = write(scheme)
    tokens = tokens_of(44)
    native, eager = opened(folder, "native"), opened(folder, "eager")
    assert native.facts.plan == "native"
    got, expected = steps(native, tokens), steps(eager, tokens)
    assert np.abs(got - expected).max() < 1e-3 * np.abs(expected).max()
    prompt = tokens_of(12, seed=3)
    assert greedy(native, prompt, 12) == greedy(eager, prompt, 12)


@pytest.mark.parametrize("activations", ["auto", "int8"])
@pytest.mark.parametrize("scheme", [NATIVE[0], NATIVE[3], *SHUFFLED], ids=name_of)
def test_inputs_in_bytes_follow_their_columns(
    scheme: Scheme, activations: ActivationDtype, write: Callable[[Scheme], Written]
) -> None:
    """An input that met the wrong column would be off by all of its size, not by its rounding."""
    folder, _, _ = write(scheme)
    tokens = tokens_of(44)
    native = opened(folder, "native", activations)
    got, expected = steps(native, tokens), steps(opened(folder, "eager"), tokens)
    assert np.linalg.norm(got - expected) < 0.04 * np.linalg.norm(expected)
    if activations == "int8":  # auto rounds what meets gate and up only, which some schemes skip
        assert not np.array_equal(got, steps(opened(folder, "native"), tokens))
    # Whole or in pieces: a piece of two tokens is normed by every thread for itself.
    driver, sequence = StepDriver(native), DrivenSequence()
    driver.step([(sequence, tokens[:2])])
    pieces = driver.step([(sequence, tokens[2:40])])
    assert np.array_equal(pieces[0].view(np.uint32), got[0].view(np.uint32))


@pytest.mark.parametrize("method", ["gptq", "awq", "packed"])
def test_sizes_that_fill_no_word(method: str, tmp_path: Path) -> None:
    """The last codes of a word belong to nobody."""
    sizes = {"hidden_size": 36, "intermediate_size": 52, "num_attention_heads": 6}
    scheme = Scheme(method, group=-1)
    model, _ = write_quantized(tmp_path, scheme, overrides={**SIZES, **sizes})
    logits = StepDriver(opened(tmp_path, "auto")).run(tokens_of(9))
    expected = reference_logits(model, tokens_of(9))[-1]
    assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize(
    "scheme", [NATIVE[0], NATIVE[3], NATIVE[6], NATIVE[9], NATIVE[12], *SHUFFLED], ids=name_of
)
def test_eager_answers_as_transformers_does(
    scheme: Scheme, write: Callable[[Scheme], Written]
) -> None:
    """Greedy tokens of transformers on the dequantised weights."""
    folder, model, _ = write(scheme)
    backend = opened(folder, "eager")
    prompt = tokens_of(9, seed=5)
    logits = StepDriver(backend).run(prompt)
    expected = reference_logits(model, prompt)[-1]
    assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()
    tokens = list(prompt)
    for _ in range(16):
        tokens.append(int(reference_logits(model, tokens)[-1].argmax()))
    assert greedy(backend, prompt, 16) == tokens[9:]


def test_other_families_too(tmp_path: Path) -> None:
    """Biases beside quantised matrices."""
    write_quantized(tmp_path, Scheme("gptq"), "qwen2")
    tokens = tokens_of(44)
    got = steps(opened(tmp_path, "native"), tokens)
    expected = steps(opened(tmp_path, "eager"), tokens)
    assert np.abs(got - expected).max() < 1e-3 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [
        (Scheme("gptq", group=16), "groups of 16 columns, no multiple of 32"),
        (
            Scheme("int8", bits=8, group=-1, symmetric=True, scale_dtype=torch.float32),
            "scales that float16 does not hold exactly",
        ),
        (Scheme("gptq", shuffle=True, apart=True), "columns in other orders than those of q, k, v"),
        (Scheme("gptq", shuffle=True, skip=()), "columns in another order (lm_head)"),
        (Scheme("gptq", shuffle=True, skip=("up_proj",)), "than those of gate, up"),
    ],
)
def test_auto_falls_back_to_eager(
    scheme: Scheme, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And says why at the start."""
    model, _ = write_quantized(tmp_path, scheme)
    caplog.set_level("INFO")
    backend = open_backend(
        resolve_model(str(tmp_path)), BackendOptions(kv_cache_memory=1 << 21, threads=1)
    )
    assert backend.facts.plan == "eager"
    assert reason in caplog.text
    logits = StepDriver(backend).run(tokens_of(9))
    expected = reference_logits(model, tokens_of(9))[-1]
    assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()


def test_a_quarter_of_the_memory(tmp_path: Path) -> None:
    sizes = {**SIZES, "hidden_size": 256, "intermediate_size": 512}
    write_quantized(tmp_path, Scheme("awq", group=128), overrides=sizes)
    native, eager = opened(tmp_path, "native"), opened(tmp_path, "eager")
    assert isinstance(native, NativeBackend)
    # Embedding and head stay float32.
    plain = 2 * 96 * 256 * 4
    assert (native.facts.weight_bytes - plain) * 7 < eager.facts.weight_bytes - plain
