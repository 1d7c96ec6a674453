"""The files of a Hugging Face folder: which shard holds a tensor, and which tensors there must be.

The index is the authority: a tensor is read from the shard that it names and from nowhere else.
Pickles are never opened. The safetensors library checks each file's header (offsets, sizes).
"""

import json
import re
from collections.abc import Collection
from pathlib import Path

from safetensors import SafetensorError, safe_open

from triptych.services.executor.group_layouts import OPTIONAL_ROLES, group_roles
from triptych.services.executor.model_config import ModelConfig
from triptych.services.executor.weights import account
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.runtime.model_files import SAFETENSORS_FILE, SAFETENSORS_INDEX

_MAX_INDEX_BYTES = 1 << 26
# Buffers that old exporters saved among the weights; the network computes them itself.
_BUFFERS = re.compile(r".*(\.rotary_emb\.inv_freq|\.attn\.(masked_)?bias)")


class SafetensorsFiles:
    """Tensor names and their shards. Raises StartupError when the index is broken."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self._folder = folder
        self._config = config
        self._files = _tensor_files(folder)

    def accounted(self, parameters: Collection[str]) -> dict[str, Path]:
        """Stored name -> shard, of exactly these parameters. Raises StartupError, naming tensors.

        A tensor that is missing, or one that the model does not use, is refused.
        """
        found = {name for name in self._files if not _BUFFERS.fullmatch(name)}
        if self._config.tied_head:
            found.discard("lm_head.weight")  # a copy: the config says that the embedding is used
        wanted: dict[str, None] = {}  # in the model's order, so that refusals name the same tensor
        for parameter in parameters:
            if (layer := self.quantized_layer(parameter)) is None:
                wanted[self.stored_name(parameter)] = None
            else:
                wanted.update(dict.fromkeys(layer.values()))
        found.difference_update(self.spare_biases(parameters))
        account(str(self._folder), wanted, found)
        return {name: self._files[name] for name in wanted}

    def spare_biases(self, parameters: Collection[str]) -> dict[str, Path]:
        """Biases of quantised layers that the model has none of: GPTQ exporters wrote zeros."""
        known = set(parameters)
        spare = {}
        for parameter in parameters:
            name = f"{parameter.removesuffix('weight')}bias"
            if name in self._files and name not in known and self.quantized_layer(parameter):
                spare[name] = self._files[name]
        return spare

    def quantized_layer(self, parameter: str) -> dict[str, str] | None:
        """Role -> stored name, of the arrays that make up a quantised matrix.

        None for a parameter that is stored as itself: what is in the files decides. The names are
        those that there must be, and those that there may be if they are.
        """
        quantization = self._config.quantization
        module, _, kind = parameter.rpartition(".")
        if quantization is None or kind != "weight":
            return None
        roles = group_roles(quantization)
        own = [role for role in roles if role != "weight"]
        if not any(f"{module}.{role}" in self._files for role in own):
            return None
        also = [role for role in OPTIONAL_ROLES if f"{module}.{role}" in self._files]
        return {role: f"{module}.{role}" for role in dict.fromkeys((*roles, *also))}

    def stored_name(self, parameter: str) -> str:
        """GPT-2 checkpoints of the base model lack the prefix."""
        short = parameter.removeprefix("transformer.")
        return short if parameter not in self._files and short in self._files else parameter


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> file, each inside the folder and present."""
    single = folder / SAFETENSORS_FILE
    if single.is_file():
        try:
            with safe_open(single, framework="np") as file:
                return dict.fromkeys(file.keys(), single)
        except SafetensorError as error:
            raise StartupError(f"{single}: broken safetensors file: {error}") from error
    index = folder / SAFETENSORS_INDEX
    weight_map = _weight_map(index)
    for name, shard in weight_map.items():
        if shard in ("", ".", "..") or "/" in shard or "\\" in shard or "\0" in shard:
            raise StartupError(f"{index}: tensor {name} points outside the folder ({shard!r:.100})")
    missing = sorted({shard for shard in weight_map.values() if not (folder / shard).is_file()})
    if missing:
        names = sorted(name for name, shard in weight_map.items() if shard == missing[0])
        raise StartupError(
            f"{folder}: shard {missing[0]} is missing; it holds {len(names)} tensors, "
            f"{names[0]} among them"
        )
    return {name: folder / shard for name, shard in weight_map.items()}


def _weight_map(index: Path) -> dict[str, str]:
    try:
        if index.stat().st_size > _MAX_INDEX_BYTES:
            raise StartupError(f"{index}: larger than {_MAX_INDEX_BYTES} bytes")
        content = json.loads(index.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartupError(f"{index}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{index}: not valid JSON: {error}") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise StartupError(f"{index}: weight_map is missing")
    out: dict[str, str] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise StartupError(f"{index}: the shard of tensor {name} is not a file name")
        out[name] = shard
    return out
