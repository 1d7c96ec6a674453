"""Weights from a Hugging Face folder: one safetensors file, or shards with an index.

Which file holds which tensor is `safetensors_files`' to say.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from triptych.services.executor.float8_tensor import Float8Tensor
from triptych.services.executor.group_tensor import GroupTensor
from triptych.services.executor.hf_config import read_hf_config
from triptych.services.executor.model_config import ModelConfig
from triptych.services.executor.safetensors_files import SafetensorsFiles
from triptych.services.executor.safetensors_raw import SafetensorsRawWeights
from triptych.services.executor.weights import Progress, check_shape
from triptych.services.runtime.lifecycle import StartupError

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class SafetensorsWeights:
    """A model folder as a WeightSource. Raises StartupError when config or index are broken."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._config = read_hf_config(folder)
        self._files = SafetensorsFiles(folder, self._config)
        self._quantized = SafetensorsRawWeights(folder) if self._config.quantization else None

    @property
    def config(self) -> ModelConfig:
        """As `WeightSource.config`."""
        return self._config

    def rope_factors(self) -> torch.Tensor | None:
        """None: the config has the scaling."""
        return None

    def load(self, parameters: Mapping[str, torch.Tensor], progress: Progress) -> None:
        """As `WeightSource.load`."""
        plain = {
            name: out
            for name, out in parameters.items()
            if self._files.quantized_layer(name) is None
        }
        files = self._files.accounted(parameters)
        total = sum(path.stat().st_size for path in set(files.values()))
        done = 0
        for path in dict.fromkeys(files.values()):
            wanted = {
                name: out
                for name, out in plain.items()
                if files[self._files.stored_name(name)] == path
            }
            self._load_file(path, wanted)
            done += path.stat().st_size
            progress(done, total)
        if self._quantized is not None:
            self._quantized.account(parameters)
            for name in [each for each in parameters if each not in plain]:  # in the model's order
                _dequantize(self._quantized, name, parameters[name])

    def _load_file(self, path: Path, wanted: Mapping[str, torch.Tensor]) -> None:
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                present = set(file.keys())
                for name, out in wanted.items():
                    stored = self._files.stored_name(name)
                    if stored not in present:
                        raise StartupError(f"{path}: tensor {stored} is missing from this file")
                    tensor = file.get_tensor(stored)
                    if tensor.dtype not in _DTYPES:
                        raise StartupError(
                            f"{path}: tensor {stored} has dtype {tensor.dtype}, which is not "
                            f"supported (float32, float16, bfloat16 are)"
                        )
                    check_shape(str(path), stored, tuple(tensor.shape), tuple(out.shape))
                    out.copy_(tensor)
        except SafetensorError as error:
            raise StartupError(f"{path}: broken safetensors file: {error}") from error
        except OSError as error:
            raise StartupError(f"{path}: {error.strerror or error}") from error


def _dequantize(source: SafetensorsRawWeights, parameter: str, out: torch.Tensor) -> None:
    """Fill a parameter [rows, columns] from its quantised layer."""
    tensor = source.tensor(parameter, tuple(out.shape))
    assert isinstance(tensor, GroupTensor | Float8Tensor)
    for start, stop in tensor.parts():
        out[start:stop].copy_(torch.from_numpy(tensor.values(start, stop)))
    tensor.release(tensor.rows)
