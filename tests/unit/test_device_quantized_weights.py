"""Matrices of quantised checkpoints, and rounded ones, as a GPU multiplies by them."""

from pathlib import Path

import numpy as np
import pytest
import torch

from float8_folders import Float8Scheme, write_float8
from quantized_folders import SIZES, Scheme, write_quantized
from tiny_models import save, tiny_model, write_gguf
from triptych.kernels.reference.quantized_weights import Float8Weight, IntWeight, QuantizedWeight
from triptych.services.executor.device.quantized_weights import DeviceMatrices
from triptych.services.executor.device.shard import MatrixPart
from triptych.services.executor.device.weights import rows_as_floats
from triptych.services.executor.float8_tensor import Float8Tensor, float8_values
from triptych.services.executor.group_tensor import GroupTensor
from triptych.services.executor.raw_weights import RawTensor, RawWeights, open_raw_weights
from triptych.services.executor.rounding import round_rows
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.runtime.model_files import resolve_model

MLP = "model.layers.1.mlp."
ATTENTION = "model.layers.0.self_attn."
HIDDEN, INNER = 128, 256
"""Of quantized_folders.SIZES."""


def dense(source: RawWeights, parts: list[MatrixPart]) -> torch.Tensor:
    rows = []
    for part in parts:
        tensor = source.tensor(part.parameter, part.shape)
        assert isinstance(tensor, RawTensor | GroupTensor | Float8Tensor)
        values = rows_as_floats(tensor, part.row_start, part.row_stop)
        rows.append(torch.from_numpy(values[:, part.column_start : part.column_stop].copy()))
    return torch.cat(rows)


def source_of(path: Path) -> RawWeights:
    source = open_raw_weights(resolve_model(str(path)))
    config = source.config
    names = ["model.embed_tokens.weight", "model.norm.weight"]
    names += [] if config.tied_head else ["lm_head.weight"]
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        names += [f"{prefix}input_layernorm.weight", f"{prefix}post_attention_layernorm.weight"]
        names += [f"{prefix}self_attn.{each}_proj.weight" for each in "qkvo"]
        names += [f"{prefix}mlp.{each}_proj.weight" for each in ("gate", "up", "down")]
    source.account(names)
    return source


def whole(name: str, rows: int, columns: int) -> MatrixPart:
    return MatrixPart.whole(f"{name}.weight", (rows, columns))


GATE_UP = [whole(MLP + "gate_proj", INNER, HIDDEN), whole(MLP + "up_proj", INNER, HIDDEN)]
DOWN = whole(MLP + "down_proj", HIDDEN, INNER)
QKV = [
    whole(ATTENTION + "q_proj", HIDDEN, HIDDEN),
    whole(ATTENTION + "k_proj", HIDDEN // 2, HIDDEN),
    whole(ATTENTION + "v_proj", HIDDEN // 2, HIDDEN),
]


def made(source: RawWeights, parts: list[MatrixPart], rounding: str = "none") -> QuantizedWeight:
    weight = DeviceMatrices(source, rounding, lambda _: pytest.fail("as floats"))(parts)
    assert isinstance(weight, IntWeight | Float8Weight)
    return weight


EXACT = [
    Scheme("gptq"), Scheme("gptq", group=64), Scheme("gptq", group=-1), Scheme("gptq", bits=8),
    Scheme("gptq_v2", group=128, symmetric=True), Scheme("awq"), Scheme("awq", group=-1),
    Scheme("awq", group=128), Scheme("packed"), Scheme("packed", symmetric=True, group=64),
    Scheme("packed", scale_dtype=torch.bfloat16), Scheme("packed", bits=8, group=64),
    Scheme("packed", scale_dtype=torch.float32, symmetric=True),
    Scheme("int8", bits=8, group=-1, symmetric=True), Scheme("int8", bits=8),
]  # fmt: skip


@pytest.mark.parametrize("scheme", EXACT, ids=lambda scheme: scheme.name)
def test_checkpoints_keep_their_values(scheme: Scheme, tmp_path: Path) -> None:
    model, _ = write_quantized(tmp_path, scheme)
    source, state = source_of(tmp_path), model.state_dict()
    for parts in (GATE_UP, [DOWN], QKV):
        weight = made(source, parts)
        assert isinstance(weight, IntWeight)
        assert weight.bits == scheme.bits
        assert (weight.zeros is None) == scheme.symmetric
        assert weight.scales.dtype == scheme.scale_dtype or scheme.scale_dtype != torch.float16
        assert torch.equal(weight.values(), torch.cat([state[part.parameter] for part in parts]))


@pytest.mark.parametrize(
    "scheme", [Scheme("gptq", shuffle=True), Scheme("gptq", group=16)], ids=lambda each: each.name
)
def test_what_kernels_cannot_take_becomes_floats(scheme: Scheme, tmp_path: Path) -> None:
    model, _ = write_quantized(tmp_path, scheme)
    source = source_of(tmp_path)
    weight = DeviceMatrices(source, "none", lambda parts: dense(source, list(parts)))([DOWN])
    assert isinstance(weight, torch.Tensor)
    assert torch.equal(weight, model.state_dict()[DOWN.parameter])


@pytest.mark.parametrize("group", [32, 64, 96, 128, -1])
def test_a_rank_has_its_rows_and_columns(group: int, tmp_path: Path) -> None:
    """Groups of 96 become such of 32."""
    scheme = Scheme("awq", group=group, skip=("lm_head", "self_attn", "gate_proj", "up_proj"))
    model, _ = write_quantized(tmp_path, scheme, overrides={"intermediate_size": 768})
    source = source_of(tmp_path)
    values = model.state_dict()[DOWN.parameter]
    for start, stop in ((0, 384), (384, 768)):
        part = MatrixPart(DOWN.parameter, (HIDDEN, 768), 32, 80, start, stop)
        assert torch.equal(made(source, [part]).values(), values[32:80, start:stop])


def test_a_rank_that_cuts_a_group_is_refused(tmp_path: Path) -> None:
    write_quantized(tmp_path, Scheme("packed", group=64))
    part = MatrixPart(DOWN.parameter, DOWN.shape, 0, HIDDEN, 32, 96)
    message = (
        r"mlp.down_proj: columns 32 to 96 of a rank cut its groups of 64 columns: take another"
    )
    with pytest.raises(StartupError, match=message):
        made(source_of(tmp_path), [part])


@pytest.mark.parametrize("rounding", ["int8", "int4"])
def test_rounding_gives_the_values_of_the_cpu(rounding: str, tmp_path: Path) -> None:
    model = tiny_model("llama", SIZES)
    save(model, tmp_path)
    source, state = source_of(tmp_path), model.state_dict()
    for parts in (GATE_UP, [DOWN], QKV):
        stored = torch.cat([state[part.parameter] for part in parts]).float().numpy()
        expected = round_rows("", stored, 8 if rounding == "int8" else 4).values()
        assert torch.equal(made(source, parts, rounding).values(), torch.from_numpy(expected))
    half = MatrixPart(DOWN.parameter, DOWN.shape, 0, HIDDEN, 128, 256)
    right = made(source, [DOWN], rounding).values()[:, 128:]
    assert torch.equal(made(source, [half], rounding).values(), right)
    head = whole("lm_head", source.config.vocabulary_size, HIDDEN)
    if not source.config.tied_head:
        weight = made(source, [head], rounding)
        assert isinstance(weight, IntWeight)
        assert weight.bits == 8


def test_rounding_to_float8(tmp_path: Path) -> None:
    model = tiny_model("llama", SIZES)
    save(model, tmp_path)
    source = source_of(tmp_path)
    weight = made(source, GATE_UP, "fp8")
    assert isinstance(weight, Float8Weight)
    stored = torch.cat([model.state_dict()[part.parameter] for part in GATE_UP]).float()
    largest = stored.abs().amax(1, keepdim=True)
    assert torch.all((weight.values() - stored).abs() <= stored.abs() / 16 + largest * 2**-18)
    assert torch.allclose(weight.values().abs().amax(1), largest[:, 0], rtol=1e-6)
    half = MatrixPart(DOWN.parameter, DOWN.shape, 0, HIDDEN, 128, 256)
    expected = made(source, [DOWN], "fp8").values()[:, 128:]
    assert torch.equal(made(source, [half], "fp8").values(), expected)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_gguf_blocks_are_groups(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(tiny_model("llama", SIZES), path, None, lambda _: kind)
    source = source_of(path)
    for parts in (GATE_UP, [DOWN], QKV):  # q and k have rows in another order
        weight = made(source, parts)
        assert isinstance(weight, IntWeight)
        assert torch.equal(weight.values(), dense(source, parts))


def test_other_gguf_types_become_floats(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(tiny_model("llama", SIZES), path, None, lambda _: "Q4_1")
    source = source_of(path)
    weight = DeviceMatrices(source, "none", lambda parts: dense(source, list(parts)))(GATE_UP)
    assert isinstance(weight, torch.Tensor)


FLOAT8 = [
    Float8Scheme("fp8", (128, 128)), Float8Scheme("fp8", None), Float8Scheme("channel", None),
    Float8Scheme("tensor", None), Float8Scheme("block", (128, 128)), Float8Scheme("fp8", (64, 128)),
]  # fmt: skip


@pytest.mark.parametrize("scheme", FLOAT8, ids=lambda scheme: scheme.name)
def test_float8_checkpoints_keep_their_values(scheme: Float8Scheme, tmp_path: Path) -> None:
    state = write_float8(tmp_path, scheme)
    source = source_of(tmp_path)
    for parts in (GATE_UP, [DOWN], QKV):
        weight = made(source, parts)
        assert isinstance(weight, Float8Weight)
        assert torch.equal(weight.values(), torch.cat([state[part.parameter] for part in parts]))
        assert torch.equal(dense(source, parts), weight.values())


def test_the_table_of_float8() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert np.array_equal(float8_values(), codes.float().numpy(), equal_nan=True)
