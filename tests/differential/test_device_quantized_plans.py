"""Quantised checkpoints, and rounded ones, on the emulated device against the CPU's plans."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from float8_folders import Float8Scheme, write_float8
from quantized_folders import SIZES, Scheme, write_quantized
from step_driver import DrivenSequence, Floats, StepDriver
from tiny_models import reference_logits, save, tiny_model
from triptych.services.executor.backend import BackendOptions, open_backend
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.runtime.model_files import resolve_model

TOLERANCE = 1e-4
DEVICE = BackendOptions(
    device="emulated", block_size=4, kv_cache_memory=1 << 20, threads=1,
    max_num_seqs=2, max_num_batched_tokens=32,
)  # fmt: skip
EAGER = BackendOptions(plan="eager", block_size=16, kv_cache_memory=1 << 20, threads=1)
TOKENS = [5, 17, 33, 2, 90, 41, 8]


def logits_of(folder: Path, options: BackendOptions) -> Floats:
    driver, sequence = (
        StepDriver(open_backend(resolve_model(str(folder)), options)),
        DrivenSequence(),
    )
    first = driver.step([(sequence, TOKENS[:-1])])
    return np.concatenate((first, driver.step([(sequence, TOKENS[-1:])])))


@pytest.mark.parametrize(
    "scheme",
    [
        Scheme("gptq"), Scheme("gptq", shuffle=True), Scheme("awq", group=64), Scheme("packed"),
        Scheme("int8", bits=8, group=-1, symmetric=True),
    ],
    ids=lambda scheme: scheme.name,
)  # fmt: skip
def test_integers(scheme: Scheme, tmp_path: Path) -> None:
    model, _ = write_quantized(tmp_path, scheme)
    got = logits_of(tmp_path, DEVICE)
    np.testing.assert_allclose(got, logits_of(tmp_path, EAGER), atol=TOLERANCE)
    np.testing.assert_allclose(got, reference_logits(model, TOKENS)[-2:], atol=TOLERANCE)


@pytest.mark.parametrize(
    "scheme",
    [Float8Scheme("fp8", (128, 128)), Float8Scheme("channel", None)],
    ids=lambda scheme: scheme.name,
)
def test_float8(scheme: Float8Scheme, tmp_path: Path) -> None:
    model = tiny_model("llama", SIZES)
    model.load_state_dict(write_float8(tmp_path, scheme))
    expected = reference_logits(model, TOKENS)[-2:]
    for options in (DEVICE, EAGER, replace(EAGER, plan="auto")):
        np.testing.assert_allclose(logits_of(tmp_path, options), expected, atol=TOLERANCE)


def test_the_native_plan_refuses_float8_by_name(tmp_path: Path) -> None:
    write_float8(tmp_path, Float8Scheme("fp8", (128, 128)))
    with pytest.raises(StartupError, match="float8 weights"):
        logits_of(tmp_path, replace(EAGER, plan="native"))


def test_a_float8_weight_that_is_no_number(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write_float8(tmp_path, Float8Scheme("channel", None))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    codes = tensors["model.layers.1.mlp.up_proj.weight"].view(torch.uint8)
    codes[3, 4] = 0xFF
    save_file(tensors, path)
    for options in (DEVICE, EAGER):
        with pytest.raises(StartupError, match="up_proj: a weight is not a finite number"):
            logits_of(tmp_path, options)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_rounding(kind: Literal["int8", "int4"], tied: bool, tmp_path: Path) -> None:
    """The CPU rounds activations too, to 16 bits here."""
    save(tiny_model("llama", {**SIZES, "tie_word_embeddings": tied}), tmp_path)
    native = replace(
        EAGER, plan="native", quantization=kind, activation_dtype="int16", kv_cache_dtype="float32"
    )
    got = logits_of(tmp_path, replace(DEVICE, quantization=kind))
    np.testing.assert_allclose(got, logits_of(tmp_path, native), atol=5e-3)
    exact = logits_of(tmp_path, DEVICE)
    assert np.abs(got - exact).max() > 1e-3  # it is rounded


def test_rounding_to_float8(tmp_path: Path) -> None:
    save(tiny_model("llama", SIZES), tmp_path)
    got = logits_of(tmp_path, replace(DEVICE, quantization="fp8"))
    exact = logits_of(tmp_path, DEVICE)
    assert 1e-3 < np.abs(got - exact).max() < 0.2 * np.abs(exact).max() + 0.05
