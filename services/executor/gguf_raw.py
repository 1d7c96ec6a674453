"""The tensors of a GGUF file, quantised as they are."""

from collections.abc import Collection
from pathlib import Path

import numpy as np
import numpy.typing as npt

from triptych.services.executor.gguf_config import ROPE_FACTORS, read_gguf_config
from triptych.services.executor.gguf_names import gguf_place
from triptych.services.executor.model_config import ModelConfig
from triptych.services.executor.raw_weights import Floats, RawTensor
from triptych.services.executor.weights import account, check_shape
from triptych.services.runtime.gguf_file import GgufTensor, open_gguf


class GgufRawWeights:
    """One GGUF file as RawWeights. Raises StartupError on a broken or unsupported file."""

    def __init__(self, path: Path) -> None:
        self._file = open_gguf(path)
        self._config = read_gguf_config(self._file)

    @property
    def config(self) -> ModelConfig:
        """As `RawWeights.config`."""
        return self._config

    def rope_factors(self) -> Floats | None:
        """The tensor `rope_freqs.weight`, if there is one."""
        tensor = self._file.tensors.get(ROPE_FACTORS)
        if tensor is None or self._config.rope is None:
            return None
        check_shape(str(self._file.path), ROPE_FACTORS, tensor.shape, (self._config.head_dim // 2,))
        values = self._raw(tensor, None).floats()
        if not ((values > 0) & np.isfinite(values)).all():
            raise self._file.broken(f"{ROPE_FACTORS} holds a value that is not positive")
        return values

    def account(self, parameters: Collection[str]) -> None:
        """As `RawWeights.account`."""
        found = set(self._file.tensors)
        if self._config.rope is not None:
            found.discard(ROPE_FACTORS)
        wanted = {gguf_place(name, self._config).name for name in parameters}
        account(str(self._file.path), wanted, found)

    def tensor(self, parameter: str, shape: tuple[int, ...]) -> RawTensor:
        """As `RawWeights.tensor`."""
        place = gguf_place(parameter, self._config)
        tensor = self._file.tensors[place.name]
        check_shape(str(self._file.path), place.name, tensor.shape, shape)
        interleaved = place.change == "interleaved"
        return self._raw(tensor, _neighbours(place.heads, shape[0]) if interleaved else None)

    def _raw(self, tensor: GgufTensor, order: npt.NDArray[np.int64] | None) -> RawTensor:
        return RawTensor(
            name=tensor.name,
            shape=tensor.shape,
            type=tensor.type,
            data=self._file.data,
            offset=tensor.offset,
            num_bytes=tensor.num_bytes,
            order=order,
        )


def _neighbours(heads: int, rows: int) -> npt.NDArray[np.int64]:
    """Which row of an interleaved q or k is row r: i and half + i of a head are (2i, 2i + 1)."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(rows)
