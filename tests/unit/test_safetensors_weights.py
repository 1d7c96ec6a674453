"""Model folders: tied heads (R52), broken shards and indices (R57), pickles (R83)."""

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file

from scripted_models import write_m2_random_llama, write_s2_positions
from triptych.services.executor.models import build_network
from triptych.services.executor.safetensors_weights import SafetensorsWeights
from triptych.services.runtime.lifecycle import StartupError

INDEX = "model.safetensors.index.json"
UP = "model.layers.1.mlp.up_proj.weight"


def load(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    source = SafetensorsWeights(folder)
    network = build_network(source.config, dtype, source.rope_factors())
    parameters = network.parameters()
    source.load(parameters, lambda done, total: None)
    return parameters


def truth(folder: Path) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        out |= load_file(path)
    return out


def check_equal(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in got.items():
        assert torch.equal(tensor, wanted[name]), name


def edit(path: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) remove tensors of a file; dots in names are double underscores."""
    tensors = load_file(path)
    for name, tensor in changes.items():
        key = name.replace("__", ".")
        tensors.pop(key, None)
        if tensor is not None:
            tensors[key] = tensor
    save_file(tensors, path)


def weight_map(folder: Path) -> dict[str, str]:
    content = json.loads((folder / INDEX).read_text())
    out: dict[str, str] = content["weight_map"]
    return out


def write_map(folder: Path, value: object) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": value}))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_m2_random_llama(tmp_path, shards=3)
    return tmp_path


@pytest.fixture
def single(tmp_path: Path) -> Path:
    write_m2_random_llama(tmp_path)
    return tmp_path


@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_is_loaded(shards: int, tmp_path: Path) -> None:
    write_m2_random_llama(tmp_path, shards=shards, attention_bias=True, mlp_bias=True)
    check_equal(load(tmp_path), truth(tmp_path))


def test_gpt2_matrices_and_prefix(tmp_path: Path) -> None:
    write_s2_positions(tmp_path, [1, 2, 3], num_positions=8)
    path = tmp_path / "model.safetensors"
    tensors = {name: torch.randn_like(tensor) for name, tensor in load_file(path).items()}
    save_file(tensors, path)
    check_equal(load(tmp_path), tensors)
    # The base model's export: no prefix, and the causal mask among the weights.
    short = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file({**short, "h.0.attn.bias": torch.ones(1, 1, 8, 8)}, path)
    check_equal(load(tmp_path), tensors)


def test_half_precision_is_widened(single: Path) -> None:
    path = single / "model.safetensors"
    tensors = load_file(path)
    tensors[UP] = tensors[UP].to(torch.bfloat16)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float16)
    save_file(tensors, path)
    got = load(single)
    assert torch.equal(got[UP], tensors[UP].float())
    assert torch.equal(got["model.norm.weight"], tensors["model.norm.weight"].float())
    assert load(single, torch.bfloat16)[UP].dtype == torch.bfloat16


def test_tied_head(tmp_path: Path) -> None:
    """R52 a: no lm_head in the file; b: a copy in the file, which is not read."""
    write_m2_random_llama(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in load(tmp_path)
    edit(tmp_path / "model.safetensors", lm_head__weight=torch.zeros(320, 48))
    assert "lm_head.weight" not in load(tmp_path)
    source = SafetensorsWeights(tmp_path)
    network = build_network(source.config, torch.float32, None)
    assert network.head is network.parameters()["model.embed_tokens.weight"]


def test_untied_head_is_missing(single: Path) -> None:
    """R52 c."""
    edit(single / "model.safetensors", lm_head__weight=None)
    with pytest.raises(StartupError, match=r"tensor lm_head\.weight missing"):
        load(single)


def test_missing_unexpected_misshapen_and_strange_tensors(single: Path) -> None:
    path = single / "model.safetensors"
    original = path.read_bytes()
    edit(path, model__layers__1__mlp__up_proj__weight=None)
    with pytest.raises(StartupError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight miss"):
        load(single)
    path.write_bytes(original)
    edit(path, model__layers__0__self_attn__q_norm__weight=torch.ones(8))
    with pytest.raises(StartupError, match=r"q_norm\.weight in the weights, but not in the model"):
        load(single)
    path.write_bytes(original)
    edit(path, model__norm__weight=torch.ones(47))
    with pytest.raises(
        StartupError, match=r"norm\.weight has shape \[47\], the model needs \[48\]"
    ):
        load(single)
    path.write_bytes(original)
    edit(path, model__norm__weight=torch.ones(48, dtype=torch.int8))
    with pytest.raises(StartupError, match=r"norm\.weight has dtype torch\.int8"):
        load(single)


@pytest.mark.parametrize("cut", [0, 5, 100, 5000, -1])
def test_a_short_file(cut: int, single: Path) -> None:
    path = single / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(StartupError, match=r"model\.safetensors: broken"):
        load(single)


def test_a_missing_shard(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(StartupError, match=r"shard model-00002-of-00003\.safetensors is missing"):
        load(sharded)


def test_a_short_shard(sharded: Path) -> None:
    path = sharded / "model-00003-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(StartupError, match=r"model-00003-of-00003\.safetensors: broken"):
        load(sharded)


def test_the_index_says_which_copy_counts(sharded: Path) -> None:
    """R57: a second, wrong copy in another shard and a stray whole checkpoint are not read."""
    wanted = truth(sharded)
    home = weight_map(sharded)[UP]
    for path in sharded.glob("model-*.safetensors"):
        if path.name != home:
            edit(path, model__layers__1__mlp__up_proj__weight=torch.zeros(96, 48))
    save_file({UP: torch.ones(96, 48)}, sharded / "consolidated.safetensors")
    check_equal(load(sharded), wanted)


def test_a_tensor_missing_from_the_index(sharded: Path) -> None:
    """It stands in its shard, but the index is the authority."""
    names = weight_map(sharded)
    del names[UP]
    write_map(sharded, names)
    with pytest.raises(StartupError, match=r"up_proj\.weight missing"):
        load(sharded)


def test_an_index_that_lies(sharded: Path) -> None:
    names = weight_map(sharded)
    others = [file for file in set(names.values()) if file != names[UP]]
    write_map(sharded, {**names, UP: others[0]})
    with pytest.raises(StartupError, match=rf"{others[0]}: tensor {UP} is missing from this file"):
        load(sharded)
    write_map(sharded, {**names, "model.extra.weight": others[0]})
    with pytest.raises(StartupError, match=r"model\.extra\.weight in the weights, but not"):
        load(sharded)


@pytest.mark.parametrize("path", ["../outside.safetensors", "/etc/passwd", "..", "", "a/b", "a\\b"])
def test_a_path_outside_the_folder(path: str, sharded: Path) -> None:
    write_map(sharded, {**weight_map(sharded), UP: path})
    with pytest.raises(StartupError, match="points outside the folder"):
        load(sharded)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": {}}',
        '{"weight_map": [1]}',
        '{"weight_map": {"a": 3}}',
        "[" * 100_000,
        "\x00",
    ],
)
def test_a_broken_index(content: str, sharded: Path) -> None:
    (sharded / INDEX).write_text(content)
    with pytest.raises(StartupError, match=r"index\.json"):
        load(sharded)


def test_a_pickle_beside_the_weights_is_not_opened(single: Path) -> None:
    marker = single / "marker"
    (single / "pytorch_model.bin").write_bytes(
        b"cbuiltins\nopen\n(V" + str(marker).encode() + b"\nVw\ntR."
    )
    wanted: npt.NDArray[np.float32] = truth(single)[UP].numpy()
    np.testing.assert_array_equal(load(single)[UP].numpy(), wanted)
    assert not marker.exists()
