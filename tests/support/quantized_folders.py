"""Quantised Hugging Face folders of tiny models, written from the published layouts.

Plain sums of shifted codes, sharing nothing with the loader. The model that is given gets the
dequantised weights, so that transformers can be the reference for what was written.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

from tiny_models import tiny_model

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Scheme:
    """How to quantise and store. `group` -1: the whole row.

    `shuffle`: act order, by a table, the same for layers of the same inputs unless `apart`.
    """

    method: str  # gptq, gptq_v2, awq, packed, int8
    bits: int = 4
    group: int = 32
    symmetric: bool = False
    shuffle: bool = False
    apart: bool = False
    skip: tuple[str, ...] = ("lm_head",)
    scale_dtype: torch.dtype = torch.float16

    @property
    def name(self) -> str:
        """For the test's id."""
        words = [self.method, f"{self.bits}", f"g{self.group}"]
        words += ["sym"] * self.symmetric + ["shuffled"] * self.shuffle
        return "-".join(words) + ("-bf16" if self.scale_dtype == torch.bfloat16 else "")


@dataclass(frozen=True)
class Layer:
    """Codes 0.. [rows, columns]; scales and zeros [rows, groups]; which group a column is in."""

    codes: Ints
    scales: torch.Tensor
    zeros: Ints
    group_of_column: Ints

    def values(self) -> torch.Tensor:
        """scale * (code - zero), float32."""
        difference = torch.from_numpy(self.codes - self.zeros[:, self.group_of_column])
        return self.scales.float()[:, self.group_of_column] * difference.float()


def write_quantized(
    folder: Path, scheme: Scheme, family: str = "llama", overrides: Mapping[str, object] = SIZES
) -> tuple[torch.nn.Module, dict[str, Layer]]:
    """Write a random model; returns it with dequantised weights, and the layers by module."""
    model = tiny_model(family, {**SIZES, **overrides})
    tensors: dict[str, torch.Tensor] = {}
    layers: dict[str, Layer] = {}
    state = model.state_dict()
    for name, weight in state.items():
        module = name.removesuffix(".weight")
        plain = weight.dim() != 2 or "embed" in name or any(skip in name for skip in scheme.skip)
        if plain:
            tensors[name] = weight.clone()
            continue
        layers[module] = layer = quantize(weight, scheme, order_seed(module, scheme))
        for role, tensor in stored(layer, scheme).items():
            tensors[f"{module}.{role}"] = tensor.contiguous()
        with torch.no_grad():
            weight.copy_(layer.values())
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = getattr(model, "config").to_dict()  # noqa: B009 - transformers has no types
    config["architectures"] = [type(model).__name__]
    config["quantization_config"] = quantization_config(scheme)
    (folder / "config.json").write_text(json.dumps(config))
    return model, layers


def order_seed(module: str, scheme: Scheme) -> int:
    """Of the shuffle of a layer's columns."""
    if not scheme.apart:
        for kind in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
            module = module.removesuffix(kind)
    return crc32(module.encode())


def quantize(weight: torch.Tensor, scheme: Scheme, seed: int) -> Layer:
    """Round to the nearest code, the range of a group from its own extremes."""
    rows, columns = weight.shape
    size = columns if scheme.group == -1 else scheme.group
    groups = columns // size
    group_of_column = np.arange(columns) // size
    if scheme.shuffle:
        group_of_column = np.random.default_rng(seed).permutation(group_of_column)
    by_group = torch.stack([weight[:, group_of_column == g] for g in range(groups)], 1)
    top = 2**scheme.bits - 1
    if scheme.symmetric:
        scales = by_group.abs().amax(-1) / (top / 2)
        zeros = np.full((rows, groups), 2 ** (scheme.bits - 1))
    else:
        low = by_group.amin(-1).clamp(max=0)
        scales = (by_group.amax(-1).clamp(min=0) - low) / top
        # The first GPTQ format cannot store zero points of 0.
        zeros = (-low / scales).round().clamp(1, top).numpy().astype(np.int64)
    scales = scales.to(scheme.scale_dtype)
    exact = scales.float()[:, group_of_column]
    codes = (weight / exact).round().numpy().astype(np.int64) + zeros[:, group_of_column]
    return Layer(codes.clip(0, top), scales, zeros, group_of_column)


def packed(codes: Ints, bits: int, axis: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """int32 words along `axis`: the i-th of a word's codes, or the order[i]-th, at bit bits * i."""
    per_word = 32 // bits
    moved = np.moveaxis(codes, axis, -1)
    count = -(-moved.shape[-1] // per_word) * per_word
    padded = np.zeros((*moved.shape[:-1], count), np.uint64)
    padded[..., : moved.shape[-1]] = moved
    words = sum(
        padded[..., place::per_word] << np.uint64(bits * i)
        for i, place in enumerate(order or range(per_word))
    )
    as_int32 = np.asarray(words, np.uint64).astype(np.uint32).view(np.int32)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(as_int32, -1, axis)))


def stored(layer: Layer, scheme: Scheme) -> dict[str, torch.Tensor]:
    """A layer's tensors by role."""
    bits, codes, zeros = scheme.bits, layer.codes, layer.zeros
    index = torch.from_numpy(layer.group_of_column.astype(np.int32))
    match scheme.method:
        case "gptq" | "gptq_v2":
            less = 1 if scheme.method == "gptq" else 0
            return {
                "qweight": packed(codes.T, bits, 0),
                "qzeros": packed(zeros.T - less, bits, 1),
                "scales": layer.scales.T,
                "g_idx": index,
            }
        case "awq":
            return {
                "qweight": packed(codes.T, bits, 1, AWQ_ORDER),
                "qzeros": packed(zeros.T, bits, 1, AWQ_ORDER),
                "scales": layer.scales.T,
            }
        case "packed":
            out = {
                "weight_packed": packed(codes, bits, 1),
                "weight_shape": torch.tensor(codes.shape),
                "weight_scale": layer.scales,
            }
            if not scheme.symmetric:
                out["weight_zero_point"] = packed(zeros, bits, 0)
        case _:
            out = {
                "weight": torch.from_numpy((codes - 128).astype(np.int8)),
                "weight_scale": layer.scales,
            }
            if not scheme.symmetric:
                out["weight_zero_point"] = torch.from_numpy((zeros - 128).astype(np.int8))
    if scheme.shuffle:
        out["weight_g_idx"] = index
    return out


def quantization_config(scheme: Scheme) -> dict[str, object]:
    """As the method's exporter writes it."""
    skipped = list(scheme.skip)
    match scheme.method:
        case "gptq" | "gptq_v2":
            return {
                "quant_method": "gptq", "bits": scheme.bits, "group_size": scheme.group,
                "damp_percent": 0.01, "desc_act": scheme.shuffle, "sym": scheme.symmetric,
                "static_groups": False, "true_sequential": True, "lm_head": False,
                "checkpoint_format": scheme.method, "pack_dtype": "int32",
            }  # fmt: skip
        case "awq":
            return {
                "quant_method": "awq", "bits": scheme.bits, "group_size": scheme.group,
                "version": "gemm", "zero_point": True, "modules_to_not_convert": skipped,
            }  # fmt: skip
    weights = {
        "num_bits": scheme.bits, "type": "int", "symmetric": scheme.symmetric, "dynamic": False,
        "strategy": "channel" if scheme.group == -1 else "group",
        "group_size": None if scheme.group == -1 else scheme.group,
        "actorder": "group" if scheme.shuffle else None, "block_structure": None,
        "observer": "minmax", "observer_kwargs": {},
    }  # fmt: skip
    group = {
        "targets": ["Linear"], "weights": weights, "input_activations": None,
        "output_activations": None,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if scheme.method == "packed" else "int-quantized",
        "config_groups": {"group_0": group}, "ignore": skipped, "kv_cache_scheme": None,
        "quantization_status": "compressed", "global_compression_ratio": 1.5,
        "version": "0.12.2", "sparsity_config": {}, "transform_config": {},
    }  # fmt: skip
