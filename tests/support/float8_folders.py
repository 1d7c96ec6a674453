"""Hugging Face folders of tiny models with e4m3 weights, from the published layouts."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from quantized_folders import SIZES
from tiny_models import tiny_model


@dataclass(frozen=True)
class Float8Scheme:
    """`kind`: fp8 (as DeepSeek's and transformers'), or a strategy of compressed-tensors."""

    kind: str
    block: tuple[int, int] | None

    @property
    def name(self) -> str:
        """For the test's id."""
        return self.kind + ("" if self.block is None else f"-{self.block[0]}x{self.block[1]}")

    @property
    def config(self) -> dict[str, object]:
        """As the method's exporter writes it."""
        block = None if self.block is None else list(self.block)
        if self.kind == "fp8":
            return {
                "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
                "weight_block_size": block, "modules_to_not_convert": ["lm_head"],
            }  # fmt: skip
        weights = {
            "num_bits": 8, "type": "float", "symmetric": True, "dynamic": False,
            "strategy": self.kind, "block_structure": block, "group_size": None,
        }  # fmt: skip
        activations = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
        return {
            "quant_method": "compressed-tensors", "format": "float-quantized",
            "config_groups": {"group_0": group}, "ignore": ["lm_head"],
        }  # fmt: skip


def write_float8(folder: Path, scheme: Float8Scheme) -> dict[str, torch.Tensor]:
    """Write a random model; returns what its weights are, float32, by parameter."""
    model = tiny_model("llama", SIZES)
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for name, weight in model.state_dict().items():
        values[name] = weight.float()
        if weight.dim() != 2 or "embed" in name or "lm_head" in name:
            tensors[name] = weight.clone()
            continue
        scales, wide = scales_of(weight.float(), scheme)
        codes = (weight.float() / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors[name] = codes
        inverse = scheme.kind == "fp8" and scheme.block is not None
        tensors[f"{name}_scale{'_inv' if inverse else ''}"] = scales
        values[name] = codes.float() * wide
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = getattr(model, "config").to_dict()  # noqa: B009 - transformers has no types
    config["architectures"] = [type(model).__name__]
    config["quantization_config"] = scheme.config
    (folder / "config.json").write_text(json.dumps(config))
    return values


def scales_of(weight: torch.Tensor, scheme: Float8Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales as they are stored, and as wide as the weight."""
    rows, columns = weight.shape
    if scheme.kind == "channel":
        scales = weight.abs().amax(1, keepdim=True) / 448
        return scales, scales.expand(rows, columns)
    if scheme.block is None:
        scale = weight.abs().max() / 448
        return (scale if scheme.kind == "fp8" else scale[None]), scale.expand(rows, columns)
    height, width = scheme.block
    down, across = -(-rows // height), -(-columns // width)
    padded = weight.new_zeros(down * height, across * width)
    padded[:rows, :columns] = weight
    blocks = padded.view(down, height, across, width)
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-12) / 448
    wide = scales.repeat_interleave(height, 0).repeat_interleave(width, 1)
    return scales, wide[:rows, :columns]
