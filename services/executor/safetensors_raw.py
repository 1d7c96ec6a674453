"""The tensors of a Hugging Face folder in the type that they are stored in."""

from collections.abc import Collection
from pathlib import Path

from triptych.services.executor.float8_tensor import Float8Tensor, float8_tensor
from triptych.services.executor.group_tensor import GroupTensor, group_tensor
from triptych.services.executor.hf_config import read_hf_config
from triptych.services.executor.model_config import ModelConfig
from triptych.services.executor.raw_weights import Floats, RawTensor
from triptych.services.executor.safetensors_files import SafetensorsFiles
from triptych.services.executor.stored_arrays import FLOAT_DTYPES, Shard, StoredArray
from triptych.services.runtime.gguf_file import TensorType

_TYPES = {"F32": TensorType.F32, "F16": TensorType.F16, "BF16": TensorType.BF16}


class SafetensorsRawWeights:
    """A model folder as RawWeights. Raises StartupError when config or index are broken."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._config = read_hf_config(folder)
        self._files = SafetensorsFiles(folder, self._config)
        self._shards: dict[str, Path] = {}
        self._open: dict[Path, Shard] = {}

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
        spare = self._files.spare_biases(parameters)
        self._shards |= spare
        for name in spare:
            array = self._array(name)
            array.check(FLOAT_DTYPES, array.shape)
            if array.floats(array.values).any():
                raise self._config.refused(f"the model has no bias {name}, which is not zero")

    def tensor(
        self, parameter: str, shape: tuple[int, ...]
    ) -> RawTensor | GroupTensor | Float8Tensor:
        """As `RawWeights.tensor`."""
        layer = self._files.quantized_layer(parameter)
        if layer is not None and len(shape) == 2:
            quantization = self._config.quantization
            assert quantization is not None
            arrays = {role: self._array(name) for role, name in layer.items()}
            module, size = parameter.removesuffix(".weight"), (shape[0], shape[1])
            if quantization.storage in ("float8", "float8_inverse"):
                return float8_tensor(quantization, module, size, arrays)
            return group_tensor(quantization, module, size, arrays)
        array = self._array(self._files.stored_name(parameter)).check(FLOAT_DTYPES, shape)
        return RawTensor(
            name=array.name,
            shape=shape,
            type=_TYPES[array.dtype],
            data=array.data,
            offset=array.offset,
            num_bytes=array.num_bytes,
        )

    def _array(self, name: str) -> StoredArray:
        path = self._shards[name]
        if path not in self._open:
            self._open[path] = Shard(path)
        return self._open[path].array(name)
