"""The tensors of a Hugging Face folder in the type that they are stored in."""

import json
import mmap
import struct
from collections.abc import Collection
from pathlib import Path

from safetensors import SafetensorError, safe_open

from triptych.services.executor.hf_config import read_hf_config
from triptych.services.executor.model_config import ModelConfig
from triptych.services.executor.raw_weights import Floats, RawTensor
from triptych.services.executor.safetensors_files import SafetensorsFiles
from triptych.services.executor.weights import check_shape
from triptych.services.runtime.gguf_file import TensorType
from triptych.services.runtime.lifecycle import StartupError

_TYPES = {"F32": TensorType.F32, "F16": TensorType.F16, "BF16": TensorType.BF16}


class SafetensorsRawWeights:
    """A model folder as RawWeights. Raises StartupError when config or index are broken."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._config = read_hf_config(folder)
        self._files = SafetensorsFiles(folder, self._config)
        self._shards: dict[str, Path] = {}
        self._open: dict[Path, _Shard] = {}

    @property
    def config(self) -> ModelConfig:
        """As `RawWeights.config`."""
        return self._config

    def rope_factors(self) -> Floats | None:
        """None: the config has the scaling."""
        return None

    def account(self, parameters: Collection[str]) -> None:
        """As `RawWeights.account`."""
        self._shards = self._files.accounted(parameters)

    def tensor(self, parameter: str, shape: tuple[int, ...]) -> RawTensor:
        """As `RawWeights.tensor`."""
        stored = self._files.stored_name(parameter)
        path = self._shards[stored]
        if path not in self._open:
            self._open[path] = _Shard(path)
        return self._open[path].tensor(stored, shape)


class _Shard:
    """A mapped file whose header the library has checked."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with safe_open(path, framework="np") as file:
                names = set(file.keys())
            with path.open("rb") as raw:
                (length,) = struct.unpack("<Q", raw.read(8))
                self._header = json.loads(raw.read(length))
                self._data = mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ)
        except SafetensorError as error:
            raise StartupError(f"{path}: broken safetensors file: {error}") from error
        except OSError as error:
            raise StartupError(f"{path}: {error.strerror or error}") from error
        self._names = names
        self._start = 8 + length

    def tensor(self, name: str, shape: tuple[int, ...]) -> RawTensor:
        if name not in self._names:
            raise StartupError(f"{self._path}: tensor {name} is missing from this file")
        entry = self._header[name]
        kind = _TYPES.get(entry["dtype"])
        if kind is None:
            raise StartupError(
                f"{self._path}: tensor {name} has dtype {entry['dtype']}, which is not "
                f"supported (float32, float16, bfloat16 are)"
            )
        check_shape(str(self._path), name, tuple(entry["shape"]), shape)
        begin, end = entry["data_offsets"]
        return RawTensor(
            name=name,
            shape=shape,
            type=kind,
            data=self._data,
            offset=self._start + begin,
            num_bytes=end - begin,
        )
