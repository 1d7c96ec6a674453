"""Tensors as they are in the files: bytes and their type, for plans that compute on those.

Knows nothing of torch: a process that runs such a plan never loads it.
"""

import mmap
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from triptych.kernels.cpu import pack_into
from triptych.services.executor.model_config import ModelConfig
from triptych.services.executor.stored_arrays import release_pages
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

    @property
    def column_order(self) -> None:
        """As `StoredTensor.column_order`: columns stay where they are."""
        return None

    @property
    def packed_type(self) -> int:
        """As `StoredTensor.packed_type`: the file's own."""
        return int(self.type)

    def obstacle(self) -> str | None:
        """As `StoredTensor.obstacle`: none."""
        return None

    def with_rows(self, order: npt.NDArray[np.int64]) -> "RawTensor":
        """As `StoredTensor.with_rows`."""
        return replace(self, order=order if self.order is None else self.order[order])

    def pack(self, start: int, stop: int, to: Bytes) -> None:
        """As `StoredTensor.pack`."""
        pack_into(self.packed_type, stop - start, self.columns, self.bytes_of(start, stop), to)

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
        values = self._floats(np.frombuffer(self.data, np.uint8, self.num_bytes, self.offset))
        return values if self.order is None else values[self.order]

    def rows_as_floats(self, start: int, stop: int) -> Floats:
        """Rows [start, stop) of a matrix, float32 [stop - start, columns]; a copy.

        Raises ValueError for a quantised type.
        """
        return self._floats(self.bytes_of(start, stop)).reshape(stop - start, self.columns)

    def _floats(self, raw: Bytes) -> Floats:
        values: Floats
        match self.type:
            case TensorType.F32:
                values = raw.view(np.float32).copy()
            case TensorType.F16:
                values = raw.view(np.float16).astype(np.float32)
            case TensorType.BF16:
                values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            case _:
                raise ValueError(f"{self.name} is of type {self.type.name}")
        return values

    def release(self, stop_row: int) -> None:
        """Let go of the pages of rows below `stop_row`: the file has them still.

        Nothing when rows are not read in order.
        """
        if self.order is not None and stop_row < self.rows:
            return
        release_pages(self.data, self.offset, self.offset + self.num_bytes // self.rows * stop_row)


class StoredTensor(Protocol):
    """A parameter as it is stored: what is packed, in whatever order the file has it."""

    @property
    def name(self) -> str:
        """In the file."""

    @property
    def rows(self) -> int:
        """Rows of a matrix."""

    @property
    def num_bytes(self) -> int:
        """In the file."""

    @property
    def packed_type(self) -> int:
        """The type that it is packed as, as the kernels number types."""

    @property
    def column_order(self) -> npt.NDArray[np.int64] | None:
        """Which column is packed as the i-th; None when each stays where it is."""

    def with_rows(self, order: npt.NDArray[np.int64]) -> "StoredTensor":
        """The same with row order[r] as row r."""

    def obstacle(self) -> str | None:
        """What the packed type cannot hold of it; None when it can hold all."""

    def floats(self) -> Floats:
        """A vector's values, float32; a copy. Raises ValueError for a quantised type."""

    def pack(self, start: int, stop: int, to: Bytes) -> None:
        """Pack rows [start, stop), as if they were a matrix of their own. `start` is a multiple of
        16, and so is `stop` but at the end."""

    def release(self, stop_row: int) -> None:
        """Let go of what is not needed once the rows below `stop_row` are done with."""


class RawWeights(Protocol):
    """An open checkpoint."""

    @property
    def config(self) -> ModelConfig:
        """The shape of the model, checked."""

    def rope_factors(self) -> Floats | None:
        """Divisors of the rotary frequencies, float32 [head_dim / 2], when the file has them."""

    def account(self, parameters: Collection[str]) -> None:
        """Raise StartupError, naming tensors, unless the file has exactly these parameters."""

    def tensor(self, parameter: str, shape: tuple[int, ...]) -> StoredTensor:
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
