"""A quantised linear layer of a checkpoint as a tensor that can be packed, or dequantised."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from triptych.kernels.cpu import pack_groups_into
from triptych.services.executor.group_layouts import (
    GroupLayout,
    LayerShape,
    group_layout,
    group_roles,
)
from triptych.services.executor.quantization import Quantization
from triptych.services.executor.stored_arrays import Floats, StoredArray, release_pages
from triptych.services.runtime.lifecycle import StartupError

Indices = npt.NDArray[np.int64]

_BLOCK = 32  # columns that the kernels take at a time
_INT4, _INT8 = 256, 257  # the kernels' formats
_MOST_BLOCKS = (1 << 15) - 1  # of a group: the number of its type is an int32
_ROWS = 512  # dequantised at a time


@dataclass(frozen=True, slots=True)
class GroupTensor:
    """Weight [r, c] = scale * (code - zero), of row r and of the group that column c is in.

    `column_order`: columns sorted by group, where they do not lie so already (act order); packed
    column i is column column_order[i]. `row_order`: row r is row row_order[r] of the checkpoint;
    None when they are the same.
    """

    name: str
    shape: tuple[int, int]
    bits: int
    group_size: int
    layout: GroupLayout
    group_of_column: npt.NDArray[np.int64]
    column_order: Indices | None
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
        """Of all its arrays."""
        return sum(array.num_bytes for array in self.layout.arrays)

    @property
    def packed_type(self) -> int:
        """As `StoredTensor.packed_type`."""
        return (_INT4 if self.bits == 4 else _INT8) + (self.group_size // _BLOCK << 16)

    def obstacle(self) -> str | None:
        """As `StoredTensor.obstacle`."""
        if self.group_size % _BLOCK:
            return f"groups of {self.group_size} columns, no multiple of {_BLOCK} ({self.name})"
        if self.group_size // _BLOCK > _MOST_BLOCKS:
            return f"groups of more than {_MOST_BLOCKS * _BLOCK} columns ({self.name})"
        if len(set(np.bincount(self.group_of_column).tolist())) > 1:
            return f"groups of different sizes ({self.name})"
        if self.layout.scale.dtype != "F16" and not np.array_equal(
            *self._halves(np.arange(self.rows))
        ):
            return f"scales that float16 does not hold exactly ({self.name})"
        return None

    def pack(self, start: int, stop: int, to: npt.NDArray[np.uint8]) -> None:
        """As `StoredTensor.pack`."""
        rows = self._rows(start, stop)
        codes, zeros = self.layout.codes(rows), self.layout.zeros(rows)
        if self.column_order is not None:
            codes = np.take(codes, self.column_order, 1)
        if self.bits == 8:
            codes ^= np.uint8(0x80)
            zeros = zeros - 128
        halves, _ = self._halves(rows)
        pack_groups_into(
            self.packed_type,
            codes,
            np.ascontiguousarray(halves).view(np.uint16),
            np.ascontiguousarray(zeros.astype(np.float16)).view(np.uint16),
            to,
        )

    def groups(
        self, start: int, stop: int
    ) -> tuple[npt.NDArray[np.uint8], Floats, npt.NDArray[np.int32]]:
        """Of rows [start, stop): unsigned codes [n, columns]; scales, zero points [n, groups]."""
        rows = self._rows(start, stop)
        return self.layout.codes(rows), self._finite_scales(rows), self.layout.zeros(rows)

    def values(self, start: int, stop: int) -> Floats:
        """Rows [start, stop) dequantised, float32 [stop - start, columns]; exact but for one
        rounding of scales that are float32."""
        rows = self._rows(start, stop)
        codes = self.layout.codes(rows).astype(np.int32)
        zeros = self.layout.zeros(rows)[:, self.group_of_column]
        scales = self._finite_scales(rows)[:, self.group_of_column]
        values: Floats = scales * (codes - zeros).astype(np.float32)
        return values

    def parts(self) -> list[tuple[int, int]]:
        """All rows, in parts that are cheap to dequantise at a time."""
        return [(at, min(at + _ROWS, self.rows)) for at in range(0, self.rows, _ROWS)]

    def floats(self) -> Floats:
        """As `StoredTensor.floats`: this is no vector."""
        raise ValueError(f"{self.name}: a quantised matrix is no vector")

    def release(self, stop_row: int) -> None:
        """As `StoredTensor.release`. Rows lie across the arrays: nothing before the last."""
        if stop_row < self.rows:
            return
        for array in self.layout.arrays:
            release_pages(array.data, array.offset, array.offset + array.num_bytes)

    def with_rows(self, order: Indices) -> "GroupTensor":
        """As `StoredTensor.with_rows`."""
        return replace(self, row_order=order if self.row_order is None else self.row_order[order])

    def _rows(self, start: int, stop: int) -> Indices:
        return np.arange(start, stop) if self.row_order is None else self.row_order[start:stop]

    def _finite_scales(self, rows: Indices) -> Floats:
        scales = self.layout.scales(rows)
        if not np.isfinite(scales).all():
            raise StartupError(f"{self.name}: a scale is not a finite number")
        return scales

    def _halves(self, rows: Indices) -> tuple[npt.NDArray[np.float16], Floats]:
        """Scales in float16, and exact."""
        scales = self._finite_scales(rows)
        with np.errstate(over="ignore", under="ignore"):
            return scales.astype(np.float16), scales


def group_tensor(
    quantization: Quantization, module: str, shape: tuple[int, int], arrays: dict[str, StoredArray]
) -> GroupTensor:
    """The layer `module` of shape (rows, columns), from its arrays by role.

    Raises StartupError when they contradict one another or the configuration.
    """
    rows, columns = shape
    size = columns if quantization.group_size is None else quantization.group_size
    if columns % size:
        raise quantization.refused(
            f"group_size {size} does not divide the {columns} columns of {module}"
        )
    layer = LayerShape(rows, columns, quantization.bits, columns // size)
    missing = [role for role in group_roles(quantization) if role not in arrays]
    assert not missing  # the checkpoint's names were accounted for
    layout = group_layout(quantization, layer, arrays.__getitem__)
    straight = np.arange(columns) // size
    index = _column_groups(quantization, arrays, layer)
    groups = straight if index is None else index
    return GroupTensor(
        name=module,
        shape=shape,
        bits=quantization.bits,
        group_size=size,
        layout=layout,
        group_of_column=groups,
        column_order=None
        if np.array_equal(groups, straight)
        else np.argsort(groups, kind="stable"),
    )


def _column_groups(
    quantization: Quantization, arrays: dict[str, StoredArray], layer: LayerShape
) -> npt.NDArray[np.int64] | None:
    """Which group a column is in, by the checkpoint's own table; None where it has no say."""
    array = arrays.get("g_idx", arrays.get("weight_g_idx"))
    if array is None:
        return None
    index = array.check(("I32", "I64"), (layer.columns,)).values.astype(np.int64)
    if not quantization.act_order:
        size = layer.columns // layer.groups
        if index.any() and not np.array_equal(index, np.arange(layer.columns) // size):
            raise quantization.refused(
                f"{array.name} reorders columns, though act order (desc_act, actorder) is off"
            )
        return None
    if index.min() < 0 or index.max() >= layer.groups:
        raise quantization.refused(
            f"{array.name} names group {int(index[(index < 0) | (index >= layer.groups)][0])}, "
            f"but there are {layer.groups}"
        )
    return index
