"""Quantised folders that are refused: one line that names the tensor or key, and the bound."""

import json
import mmap
import struct
from collections.abc import Callable
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantized_folders import Scheme, write_quantized
from triptych.kernels.cpu import packed_bytes
from triptych.services.executor.backend import BackendOptions, open_backend
from triptych.services.executor.group_tensor import group_tensor
from triptych.services.executor.quantization import SUPPORTED, Quantization, read_quantization
from triptych.services.executor.stored_arrays import StoredArray
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.runtime.model_files import resolve_model

UP = "model.layers.1.mlp.up_proj"
Tensors = dict[str, torch.Tensor]
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}


def compressed(
    weights: dict[str, object] | None = None, group: dict[str, object] | None = None, **top: object
) -> dict[str, object]:
    scheme = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    inner = {"targets": ["Linear"], "weights": {**scheme, "group_size": 64, **(weights or {})}}
    groups = {"group_0": {**inner, **(group or {})}}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": groups, **top,
    }  # fmt: skip


def read(value: object) -> Quantization | None:
    return read_quantization("config.json", value)


@pytest.mark.parametrize(
    ("config", "storage", "bits", "group", "shift"),
    [
        (GPTQ, "gptq", 4, 128, 1),
        ({**GPTQ, "bits": 8, "group_size": -1}, "gptq", 8, None, 1),
        ({**GPTQ, "checkpoint_format": "gptq_v2"}, "gptq", 4, 128, 0),
        (AWQ, "awq", 4, 128, 0),
        ({**AWQ, "version": "GEMM"}, "awq", 4, 128, 0),
        (compressed(), "packed", 4, 64, 0),
        (compressed({"strategy": "channel", "group_size": None}), "packed", 4, None, 0),
        (
            compressed(
                {"num_bits": 8, "strategy": "channel"},
                {"input_activations": {"num_bits": 8, "dynamic": True}},
                format="int-quantized",
            ),
            "int8", 8, None, 0,
        ),
    ],
)  # fmt: skip
def test_reads(
    config: dict[str, object], storage: str, bits: int, group: int | None, shift: int
) -> None:
    got = read(config)
    assert got is not None
    assert (got.storage, got.bits, got.group_size, got.zero_shift) == (storage, bits, group, shift)


def test_no_config_is_no_quantisation() -> None:
    assert read(None) is None


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "fp8", "activation_scheme": "static"}, "activation_scheme 'static'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method 'bitsandbytes'"),
        ({"bits": 4}, "quant_method None"),
        ({**GPTQ, "bits": 3}, "bits 3"),
        ({**GPTQ, "bits": 4.0}, "bits 4.0"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({**GPTQ, "is_marlin_format": True}, "is_marlin_format True"),
        ({**GPTQ, "dynamic": {"-:.*down.*": {}}}, "dynamic {"),
        ({**GPTQ, "pack_dtype": "int16"}, "pack_dtype 'int16'"),
        ({**AWQ, "version": "gemv"}, "version 'gemv'"),
        ({**AWQ, "bits": 8}, "bits 8"),
        (compressed(format="float-quantized"), "type 'int'"),
        (compressed(format="marlin-24"), "format 'marlin-24'"),
        (compressed(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme {"),
        (compressed(sparsity_config={"format": "sparse-24"}), "sparsity_config {"),
        (compressed(config_groups={}), "config_groups {}"),
        (compressed({"type": "float", "num_bits": 8}), "type 'float'"),
        (compressed({"num_bits": 2}), "num_bits 2"),
        (compressed({"strategy": "tensor"}), "strategy 'tensor'"),
        (compressed({"strategy": "block"}), "strategy 'block'"),
        (compressed({"dynamic": True}), "dynamic True"),
        (compressed(group={"targets": ["Linear", "Embedding"]}), "targets ["),
        (compressed(group={"input_activations": {"dynamic": False}}), "input_activations {"),
        (compressed(format="int-quantized"), "num_bits 4"),
    ],
)
def test_refuses_with_what_is_supported(config: dict[str, object], named: str) -> None:
    with pytest.raises(StartupError) as caught:
        read(config)
    message = str(caught.value)
    assert message.startswith("config.json: quantization_config: ")
    assert named in message
    assert SUPPORTED in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("awq", "'awq' is not an object"),
        ({**GPTQ, "group_size": 0}, "group_size 0 is not -1 or within 1 and"),
        ({**GPTQ, "group_size": "128"}, "group_size '128' is not -1 or within"),
        ({**GPTQ, "group_size": None}, "group_size None is not -1 or within"),
        ({**GPTQ, "desc_act": 1}, "desc_act 1 is not true or false"),
        (compressed({"symmetric": None}), "symmetric None is not true or false"),
    ],
)
def test_refuses_bad_values(config: object, message: str) -> None:
    with pytest.raises(StartupError, match=message):
        read(config)


def drop(role: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        del tensors[f"{UP}.{role}"]

    return change


def replace(role: str, tensor: torch.Tensor) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[f"{UP}.{role}"] = tensor

    return change


def scaled(role: str, factor: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[f"{UP}.{role}"] = tensors[f"{UP}.{role}"] * factor

    return change


BAD_GROUP = torch.full((128,), 4, dtype=torch.int32)
GPTQ4, AWQ4, PACKED = Scheme("gptq"), Scheme("awq"), Scheme("packed", symmetric=True)
SHUFFLED = Scheme("gptq", shuffle=True)
BROKEN = [
    (GPTQ4, drop("scales"), f"tensor {UP}.scales missing"),
    (GPTQ4, drop("qzeros"), f"tensor {UP}.qzeros missing"),
    (GPTQ4, drop("qweight"), f"tensor {UP}.qweight missing"),
    (SHUFFLED, drop("g_idx"), f"tensor {UP}.g_idx missing"),
    (PACKED, drop("weight_shape"), f"tensor {UP}.weight_shape missing"),
    (PACKED, drop("weight_scale"), f"tensor {UP}.weight_scale missing"),
    (AWQ4, replace("g_idx_", BAD_GROUP), f"tensor {UP}.g_idx_ in the weights"),
    (GPTQ4, replace("qweight", torch.zeros(16, 128, dtype=torch.int32)), "needs [16, 256]"),
    (AWQ4, replace("qweight", torch.zeros(16, 256, dtype=torch.int32)), "needs [128, 32]"),
    (GPTQ4, replace("scales", torch.zeros(2, 256)), "has shape [2, 256], the model needs [4, 256]"),
    (GPTQ4, replace("qweight", torch.zeros(16, 256)), "has dtype F32"),
    (GPTQ4, replace("scales", torch.zeros(4, 256, dtype=torch.int32)), "has dtype I32"),
    (GPTQ4, scaled("scales", float("inf")), f"{UP}: a scale is not a finite number"),
    (GPTQ4, replace("bias", torch.ones(256)), f"the model has no bias {UP}.bias"),
    (GPTQ4, replace("bias", torch.zeros(256, dtype=torch.uint8)), f"{UP}.bias has dtype U8"),
    (SHUFFLED, replace("g_idx", BAD_GROUP), "names group 4, but there are 4"),
    (SHUFFLED, replace("g_idx", -BAD_GROUP), "names group -4, but there are 4"),
    (GPTQ4, replace("g_idx", BAD_GROUP), "reorders columns, though act order"),
    (PACKED, replace("weight_shape", torch.tensor([256, 64])), "says [256, 64]"),
]


@pytest.mark.parametrize("plan", ["native", "eager"])
@pytest.mark.parametrize(("scheme", "change", "message"), BROKEN)
def test_broken_files_give_one_line(
    scheme: Scheme,
    change: Callable[[Tensors], None],
    message: str,
    plan: str,
    tmp_path: Path,
) -> None:
    write_quantized(tmp_path, scheme)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(StartupError) as caught:
        opened(tmp_path, plan)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def opened(folder: Path, plan: str = "eager") -> None:
    options = BackendOptions(
        plan="native" if plan == "native" else "eager", kv_cache_memory=1 << 20, threads=1
    )
    open_backend(resolve_model(str(folder)), options)


@pytest.mark.parametrize("plan", ["native", "eager"])
def test_a_group_that_does_not_divide(plan: str, tmp_path: Path) -> None:
    write_quantized(tmp_path, GPTQ4)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["group_size"] = 96
    path.write_text(json.dumps(config))
    with pytest.raises(StartupError, match=r"group_size 96 does not divide the 128 columns of"):
        opened(tmp_path, plan)


def test_a_group_whose_type_has_no_number() -> None:
    """The type is an int32: format, and the blocks of a group above it."""
    columns = 1 << 20
    words = {
        "weight_packed": ("I32", (16, columns // 8)),
        "weight_scale": ("F16", (16, 1)),
        "weight_shape": ("I64", (2,)),
    }
    area = mmap.mmap(-1, 16 * columns)
    area[:16] = struct.pack("<qq", 16, columns)
    arrays = {
        role: StoredArray("file", role, dtype, shape, area, 0, prod(shape) * int(dtype[1:]) // 8)
        for role, (dtype, shape) in words.items()
    }
    quantization = read(compressed({"strategy": "channel", "group_size": None}))
    assert quantization is not None
    tensor = group_tensor(quantization, "layer", (16, columns), arrays)
    assert tensor.obstacle() == f"groups of more than {columns - 32} columns (layer)"
    with pytest.raises(TypeError):
        packed_bytes(tensor.packed_type, 16, columns)


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zero_biases_of_old_exporters_are_passed_over(zero: float, tmp_path: Path) -> None:
    write_quantized(tmp_path, GPTQ4)
    path = tmp_path / "model.safetensors"
    bias = torch.full((256,), zero, dtype=torch.bfloat16)
    save_file({**load_file(path), f"{UP}.bias": bias}, path)
    opened(tmp_path, "native")
    opened(tmp_path, "eager")
