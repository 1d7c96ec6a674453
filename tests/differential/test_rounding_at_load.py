"""--quantization: what rounding costs, and that both plans round alike."""

import json
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given
from hypothesis import strategies as st

from quantized_folders import SIZES, Scheme, write_quantized
from step_driver import StepDriver
from tiny_models import save, tiny_model, write_gguf
from triptych.kernels.cpu import _cpu
from triptych.services.executor.backend import Backend, BackendOptions, open_backend
from triptych.services.executor.packed_weights import (
    anonymous_memory,
    pack_weights,
    parts_of,
    places_of,
    plan_weights,
    total_bytes,
)
from triptych.services.executor.rounding import Bits, RoundedWeights, Rounding, round_rows
from triptych.services.executor.safetensors_raw import SafetensorsRawWeights
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.runtime.model_files import resolve_model

BITS: tuple[Bits, ...] = (8, 4)
ROUNDINGS: tuple[Rounding, ...] = ("int8", "int4")


def opened(path: Path, plan: str, rounding: Rounding) -> Backend:
    options = BackendOptions(
        plan="native" if plan == "native" else "eager",
        kv_cache_memory=1 << 21,
        kv_cache_dtype="float32",
        activation_dtype="int16",
        threads=1,
        quantization=rounding,
    )
    return open_backend(resolve_model(str(path)), options)


@given(seed=st.integers(0, 2**32), power=st.integers(-4, 3), bits=st.sampled_from(BITS))
def test_no_weight_is_further_than_half_a_step(seed: int, power: int, bits: Bits) -> None:
    """Nor, at 4 bits, than another half, for the zero point."""
    rng = np.random.default_rng(seed)
    weights = (rng.standard_normal((5, 96)) * 10.0**power).astype(np.float32)
    weights[rng.random((5, 96)) < 0.2] = 0
    got = round_rows("w", weights, bits)
    step = np.repeat(got.scales.astype(np.float32), 32, 1)
    halves = 0.5 if bits == 8 else 1.0
    assert (np.abs(got.values() - weights) <= step * (halves + 0.001)).all()
    assert (got.values()[weights == 0] == 0).all()


@pytest.mark.parametrize(("bits", "kind", "limit"), [(8, "Q8_0", 0.006), (4, "Q4_1", 0.085)])
def test_costs_what_the_like_type_of_gguf_costs(bits: Bits, kind: str, limit: float) -> None:
    weights = np.random.default_rng(2).standard_normal((64, 512)).astype(np.float32)
    number = GGMLQuantizationType[kind]
    peer = np.linalg.norm(dequantize(quantize(weights, number), number) - weights)
    error = np.linalg.norm(round_rows("w", weights, bits).values() - weights)
    assert error < 1.15 * peer
    assert error < limit * np.linalg.norm(weights)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("poison", [np.nan, np.inf, 3e38])
def test_refuses_what_has_no_scale(bits: Bits, poison: float) -> None:
    weights = np.ones((2, 64), np.float32)
    weights[1, 40] = poison
    with pytest.raises(StartupError, match="w: weights that are not finite, or too large"):
        round_rows("w", weights, bits)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packs_what_it_rounds(rounding: Rounding, dtype: str, tmp_path: Path) -> None:
    """In the right types: int4 leaves embedding and head at 8 bits."""
    model = tiny_model("llama", SIZES)
    save(model.bfloat16() if dtype == "bfloat16" else model, tmp_path)
    source = RoundedWeights(SafetensorsRawWeights(tmp_path), rounding)
    places = places_of(parts_of(source.config), source)
    memory = anonymous_memory(total_bytes(places))
    pack_weights(places, source, memory, 2, lambda done, total: None)
    packed = plan_weights(places, memory)
    state = model.float().state_dict()
    for place in places:
        value = packed[place.part.name]
        weights = state[place.part.parameter].numpy()
        if not isinstance(value, tuple):
            assert np.array_equal(value, weights)
            continue
        edge = place.part.name in ("embedding", "head")
        bits: Bits = 8 if rounding == "int8" or edge else 4
        assert value[0] & 0xFFFF == (256 if bits == 4 else 257)
        assert np.array_equal(_cpu.unpack_matrix(value), round_rows("", weights, bits).values())


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_the_plans_agree(rounding: Rounding, tmp_path: Path) -> None:
    save(tiny_model("llama", {**SIZES, "tie_word_embeddings": True}), tmp_path)
    tokens = [int(token) for token in np.random.default_rng(0).integers(0, 96, 40)]
    native, eager = opened(tmp_path, "native", rounding), opened(tmp_path, "eager", rounding)
    got, expected = StepDriver(native).run(tokens), StepDriver(eager).run(tokens)
    assert np.abs(got - expected).max() < 1e-3 * np.abs(expected).max()
    assert native.facts.weight_bytes * 3 < eager.facts.weight_bytes


@pytest.mark.parametrize("plan", ["native", "eager"])
def test_refuses_weights_that_it_cannot_round(plan: str, tmp_path: Path) -> None:
    gguf = tmp_path / "model.gguf"
    write_gguf(tiny_model("llama", {}), gguf)
    with pytest.raises(StartupError, match="is no folder of float weights"):
        opened(gguf, plan, "int8")
    quantised = tmp_path / "quantised"
    write_quantized(quantised, Scheme("gptq"))
    with pytest.raises(StartupError, match="quantization int4: the weights are quantised already"):
        opened(quantised, plan, "int4")
    odd = tmp_path / "odd"
    save(tiny_model("llama", {}), odd)
    with pytest.raises(StartupError, match="48 columns are no multiple of 32"):
        opened(odd, plan, "int8")
    assert json.loads((odd / "config.json").read_text())["hidden_size"] == 48


def test_refuses_other_families(tmp_path: Path) -> None:
    save(tiny_model("gpt2", {"n_embd": 64}), tmp_path)
    with pytest.raises(StartupError, match="not supported for GPT2LMHeadModel"):
        opened(tmp_path, "eager", "int8")
