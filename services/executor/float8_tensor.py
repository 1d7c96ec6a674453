"""A linear layer of a checkpoint whose weights are e4m3 floats, with scales."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from triptych.services.executor.quantization import Quantization
from triptych.services.executor.stored_arrays import (
    FLOAT_DTYPES,
    Floats,
    StoredArray,
    release_pages,
)
from triptych.services.runtime.lifecycle import StartupError

Indices = npt.NDArray[np.int64]
Codes = npt.NDArray[np.uint8]

_ROWS = 512  # dequantised at a time
_NAN = 0x7F  # without its sign


def float8_values() -> Floats:
    """What each code of e4m3 is, float32 [256]: no infinities, exponent bias 7."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    normal = (8 + mantissa) * 2.0 ** (exponent - 10)
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, normal)
    magnitude[codes & _NAN == _NAN] = np.nan
    return np.where(codes < 128, magnitude, -magnitude).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Float8Tensor:
    """Weight [r, c] = scale * value. `block`: rows and columns that share a scale; None: all
    columns do, of each row or of all. `row_order`: as of GroupTensor."""

    name: str
    shape: tuple[int, int]
    weight: StoredArray
    scale: StoredArray
    block: tuple[int, int] | None
    row_order: Indices | None = None

    @property
    def rows(self) -> int:
        """Outputs."""
        return self.shape[0]

    @property
    def columns(self) -> int:
        """Inputs."""
        return self.shape[1]

    @property
    def num_bytes(self) -> int:
        """Of both arrays."""
        return self.weight.num_bytes + self.scale.num_bytes

    @property
    def packed_type(self) -> int:
        """As `StoredTensor.packed_type`: there is none."""
        return -1

    @property
    def column_order(self) -> None:
        """As `StoredTensor.column_order`: columns stay where they are."""
        return None

    def obstacle(self) -> str | None:
        """As `StoredTensor.obstacle`."""
        return f"float8 weights ({self.name})"

    def codes(self, start: int, stop: int) -> Codes:
        """Rows [start, stop), uint8. Raises StartupError when one is not a number."""
        rows = self._rows(start, stop)
        codes: Codes = np.asarray(self.weight.values[rows], np.uint8)
        if (codes & _NAN == _NAN).any():
            raise StartupError(f"{self.name}: a weight is not a finite number")
        return codes

    def row_scales(self, start: int, stop: int) -> Floats:
        """Of rows [start, stop), float32 [rows, groups of columns]. Raises StartupError."""
        scales = self.scale.floats(self.scale.values)
        if self.block is None:
            scales = scales.reshape(-1, 1)
        if not np.isfinite(scales).all():
            raise StartupError(f"{self.name}: a scale is not a finite number")
        rows = self._rows(start, stop)
        if self.block is not None:
            return scales[rows // self.block[0]]
        return scales[rows] if len(scales) == self.rows else np.repeat(scales, len(rows), 0)

    def values(self, start: int, stop: int) -> Floats:
        """Rows [start, stop) dequantised, float32 [stop - start, columns]; rounded once."""
        scales = self.row_scales(start, stop)
        groups = np.arange(self.columns) // (self.columns if self.block is None else self.block[1])
        values: Floats = float8_values()[self.codes(start, stop)] * scales[:, groups]
        return values

    def parts(self) -> list[tuple[int, int]]:
        """All rows, in parts that are cheap to dequantise at a time."""
        return [(at, min(at + _ROWS, self.rows)) for at in range(0, self.rows, _ROWS)]

    def floats(self) -> Floats:
        """As `StoredTensor.floats`: this is no vector."""
        raise ValueError(f"{self.name}: a quantised matrix is no vector")

    def pack(self, start: int, stop: int, to: Codes) -> None:
        """As `StoredTensor.pack`: it cannot be (`obstacle`)."""
        raise ValueError(f"{self.name}: float8 weights are not packed")

    def with_rows(self, order: Indices) -> "Float8Tensor":
        """As `StoredTensor.with_rows`."""
        return replace(self, row_order=order if self.row_order is None else self.row_order[order])

    def release(self, stop_row: int) -> None:
        """As `StoredTensor.release`."""
        if stop_row < self.rows:
            return
        for array in (self.weight, self.scale):
            release_pages(array.data, array.offset, array.offset + array.num_bytes)

    def _rows(self, start: int, stop: int) -> Indices:
        return np.arange(start, stop) if self.row_order is None else self.row_order[start:stop]


def float8_tensor(
    quantization: Quantization,
    module: str,
    shape: tuple[int, int],
    arrays: Mapping[str, StoredArray],
) -> Float8Tensor:
    """The layer `module` of shape (rows, columns), from its arrays by role.

    Raises StartupError when they contradict the configuration.
    """
    weight = arrays["weight"].check(("F8_E4M3",), shape)
    (scale,) = (array for role, array in arrays.items() if role != "weight")
    block = quantization.block
    if block is not None:
        scale.check(FLOAT_DTYPES, (-(-shape[0] // block[0]), -(-shape[1] // block[1])))
    elif scale.shape not in ((), (1,), (shape[0],)):
        scale.check(FLOAT_DTYPES, (shape[0], 1))
    else:
        scale.check(FLOAT_DTYPES, scale.shape)
    return Float8Tensor(module, shape, weight, scale, block)
