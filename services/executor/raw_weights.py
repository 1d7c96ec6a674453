"""Tensors as they are in the files: bytes and their type, for plans that compute on those.

Knows nothing of torch: a process that runs such a plan never loads it.
"""

import mmap
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from triptych.services.executor.model_config import ModelConfig
from triptych.services.runtime.gguf_file import BLOCKS, TensorType
from triptych.services.runtime.model_files import ModelFiles

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor in a mapped file, row-major: `num_bytes` from `offset` on, `type` elements.

    `order`: row r of the parameter is row order[r] of the file; None when they are the same.
    """

    name: str
    shape: tuple[int, ...]
    type: TensorType
    data: mmap.mmap
    offset: int
    num_bytes: int
    order: npt.NDArray[np.int64] | None = None

    @property
    def columns(self) -> int:
        """Elements of a row; a vector is one."""
        return self.shape[-1]

    @property
    def rows(self) -> int:
        """Rows of a matrix."""
        return int(np.prod(self.shape[:-1], dtype=np.int64))

    def bytes_of(self, start: int, stop: int) -> Bytes:
        """The bytes of rows [start, stop) of a matrix in the parameter's order; a view, if it can
        be."""
        row_bytes = self.num_bytes // self.rows
        raw = np.frombuffer(self.data, np.uint8, self.num_bytes, self.offset)
        if self.order is None:
            return raw[start * row_bytes : stop * row_bytes]
        return raw.reshape(self.rows, row_bytes)[self.order[start:stop]].reshape(-1)

    def floats(self) -> Floats:
        """A vector's values, float32; a copy. Raises ValueError for a quantised type."""
        raw = np.frombuffer(self.data, np.uint8, self.num_bytes, self.offset)
        values: Floats
        match self.type:
            case TensorType.F32:
                values = raw.view(np.float32).copy()
            case TensorType.F16:
                values = raw.view(np.float16).astype(np.float32)
            case TensorType.BF16:
                values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            case _:
                raise ValueError(f"{self.name}: a vector of type {self.type.name}")
        return values if self.order is None else values[self.order]

    def release(self, stop_row: int) -> None:
        """Let go of the pages of rows below `stop_row`: the file has them still.

        Nothing when rows are not read in order.
        """
        if self.order is not None and stop_row < self.rows:
            return
        end = self.offset + self.num_bytes // self.rows * stop_row
        start = self.offset // mmap.PAGESIZE * mmap.PAGESIZE
        # The last page may hold what is read next, unless there is no next.
        length = (end - start) // mmap.PAGESIZE * mmap.PAGESIZE
        if length > 0:
            self.data.madvise(mmap.MADV_DONTNEED, start, length)


class RawWeights(Protocol):
    """An open checkpoint."""

    @property
    def config(self) -> ModelConfig:
        """The shape of the model, checked."""

    def rope_factors(self) -> Floats | None:
        """Divisors of the rotary frequencies, float32 [head_dim / 2], when the file has them."""

    def account(self, parameters: Collection[str]) -> None:
        """Raise StartupError, naming tensors, unless the file has exactly these parameters."""

    def tensor(self, parameter: str, shape: tuple[int, ...]) -> RawTensor:
        """Find a parameter by its name in transformers' state dict.

        Raises StartupError when it has another shape, or a type that is not supported.
        """


def row_bytes(kind: TensorType, columns: int) -> int:
    """Bytes of `columns` elements, whole blocks."""
    elements, size = BLOCKS[kind]
    return columns // elements * size


def open_raw_weights(files: ModelFiles) -> RawWeights:
    """Open a checkpoint and check its configuration. Raises StartupError when it is broken."""
    match files.kind:
        case "gguf":
            from triptych.services.executor.gguf_raw import GgufRawWeights

            return GgufRawWeights(files.path)
        case "folder":
            from triptych.services.executor.safetensors_raw import SafetensorsRawWeights

            return SafetensorsRawWeights(files.path)
