"""Weights onto a device: every type of file gives the values that the eager plan computes with."""

from pathlib import Path

import pytest
import torch

from tiny_models import save, tiny_model, write_gguf
from triptych.services.executor.device.emulated_device import EmulatedDevice
from triptych.services.executor.device.linear import DenseLinear, Linear, QuantizedLinear
from triptych.services.executor.device.shard import Shard
from triptych.services.executor.device.weights import WeightLoader
from triptych.services.executor.raw_weights import open_raw_weights
from triptych.services.runtime.model_files import resolve_model


def loaded(path: Path, dtype: torch.dtype, shard: Shard) -> dict[str, torch.Tensor]:
    """Matrices of the first layer, embedding and head, as plain tensors; what progress said."""
    device = EmulatedDevice()
    heard: list[tuple[int, int]] = []
    source = open_raw_weights(resolve_model(str(path)))
    loader = WeightLoader(source, device, shard, dtype)
    weights = loader.load(64, lambda done, total: heard.append((done, total)))
    assert heard == sorted(heard)
    assert heard[-1][0] == heard[-1][1] > 0
    layer = weights.layers[0]
    out = {"embedding": weights.embedding, "head": plain(weights.head)}
    for name in ("qkv", "output", "gate_up", "down"):
        out[name] = plain(getattr(layer, name))
    device.close()
    return {name: tensor.as_subclass(torch.Tensor) for name, tensor in out.items()}


def plain(linear: Linear) -> torch.Tensor:
    """What it multiplies by; codes are dequantised."""
    if isinstance(linear, DenseLinear):
        return linear.weight
    assert isinstance(linear, QuantizedLinear)
    return linear.weight.values()


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard", [Shard(), Shard(1, 2)])
def test_values_are_the_files(
    stored: torch.dtype, dtype: torch.dtype, shard: Shard, tmp_path: Path
) -> None:
    model = tiny_model("llama", {"vocab_size": 95}).to(stored)
    save(model, tmp_path)
    got = loaded(tmp_path, dtype, shard)
    state = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}

    def rows(name: str) -> torch.Tensor:
        return part(state[f"model.layers.0.{name}.weight"], 0)

    def part(tensor: torch.Tensor, axis: int) -> torch.Tensor:
        size = tensor.shape[axis] // shard.size
        return tensor.narrow(axis, shard.rank * size, size)

    start, stop, padded = shard.vocabulary(95)
    expected = {
        "embedding": state["model.embed_tokens.weight"][start:stop],
        "qkv": torch.cat([rows(f"self_attn.{name}_proj") for name in "qkv"]),
        "output": part(state["model.layers.0.self_attn.o_proj.weight"], 1),
        "gate_up": torch.cat([rows(f"mlp.{name}_proj") for name in ("gate", "up")]),
        "down": part(state["model.layers.0.mlp.down_proj.weight"], 1),
    }
    for name, tensor in expected.items():
        assert got[name].dtype == dtype
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=0)
    head = state["lm_head.weight"][start:stop]
    torch.testing.assert_close(got["head"][: stop - start], head, rtol=0, atol=0)
    assert len(got["head"]) == padded
    assert not got["head"][stop - start :].any(), "padding is zero"


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_gguf_and_its_folder_have_the_same_order(kind: str, tmp_path: Path) -> None:
    sizes: dict[str, object] = {"hidden_size": 64, "intermediate_size": 128}
    model = tiny_model("llama", {**sizes, "num_attention_heads": 4})
    save(model, tmp_path / "folder")
    write_gguf(model, tmp_path / "model.gguf", type_of=lambda _: kind)
    for shard in (Shard(), Shard(0, 2), Shard(1, 2)):
        folder = loaded(tmp_path / "folder", torch.float32, shard)
        gguf = loaded(tmp_path / "model.gguf", torch.float32, shard)
        for name, tensor in gguf.items():
            torch.testing.assert_close(
                tensor, folder[name], rtol=0, atol=0 if kind == "F32" else 0.02
            )
