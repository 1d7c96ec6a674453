"""Where the codes, scales and zero points of a quantised linear layer lie in a checkpoint.

A layer has weights [rows, columns] (outputs, inputs), a group of columns one scale and zero point
a row: weight = scale * (code - zero). Every layout gives these as plain numbers, codes unsigned.

Layouts as their projects publish them: AutoGPTQ and GPTQModel ("gptq"), AutoAWQ ("gemm"), and
compressed-tensors ("pack-quantized", "int-quantized"). Words are int32, little-endian; the first
code of a word is in its lowest bits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from triptych.services.executor.quantization import Quantization
from triptych.services.executor.stored_arrays import FLOAT_DTYPES, Floats, Stored, StoredArray

Codes = npt.NDArray[np.uint8]
Zeros = npt.NDArray[np.int32]
Rows = npt.NDArray[np.int64]

OPTIONAL_ROLES = ("g_idx", "weight_g_idx")
"""Written by some exporters for every layer; with act order they are required."""

# Nibble i of a word of AWQ's is column _AWQ_ORDER[i] of eight.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class GroupLayout(Protocol):
    """The arrays of a layer. `rows` are indices into its rows, in any order."""

    @property
    def scale(self) -> StoredArray:
        """The array of scales."""

    @property
    def arrays(self) -> tuple[StoredArray, ...]:
        """All that belong to it."""

    def codes(self, rows: Rows) -> Codes:
        """[len(rows), columns], a new array."""

    def zeros(self, rows: Rows) -> Zeros:
        """[len(rows), groups]."""

    def scales(self, rows: Rows) -> Floats:
        """[len(rows), groups]."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes of a layer's matrix, its bits a code and its groups."""

    rows: int
    columns: int
    bits: int
    groups: int

    @property
    def per_word(self) -> int:
        """Codes in 32 bits."""
        return 32 // self.bits

    def words(self, count: int) -> int:
        """Words that so many codes fill."""
        return -(-count // self.per_word)


@dataclass(frozen=True, slots=True)
class GptqLayout:
    """qweight [columns / 8, rows], words along columns; qzeros [groups, rows / 8], along rows."""

    shape: LayerShape
    qweight: StoredArray
    qzeros: StoredArray
    scale: StoredArray
    zero_shift: int

    @property
    def arrays(self) -> tuple[StoredArray, ...]:
        """As `GroupLayout.arrays`."""
        return self.qweight, self.qzeros, self.scale

    def codes(self, rows: Rows) -> Codes:
        """As `GroupLayout.codes`."""
        words = _bytes_of(_columns(self.qweight.values, rows))
        codes = _unpacked(words.swapaxes(0, 1), self.shape.bits).reshape(len(rows), -1)
        return np.ascontiguousarray(codes[:, : self.shape.columns])

    def zeros(self, rows: Rows) -> Zeros:
        """As `GroupLayout.zeros`."""
        zeros = _unpacked(_bytes_of(self.qzeros.values), self.shape.bits)
        straight = zeros.reshape(self.shape.groups, -1)[:, rows].T
        return straight.astype(np.int32) + np.int32(self.zero_shift)

    def scales(self, rows: Rows) -> Floats:
        """As `GroupLayout.scales`."""
        return self.scale.floats(_columns(self.scale.values, rows)).T


@dataclass(frozen=True, slots=True)
class AwqLayout:
    """qweight [columns, rows / 8] and qzeros [groups, rows / 8], words along rows, shuffled."""

    shape: LayerShape
    qweight: StoredArray
    qzeros: StoredArray
    scale: StoredArray

    @property
    def arrays(self) -> tuple[StoredArray, ...]:
        """As `GroupLayout.arrays`."""
        return self.qweight, self.qzeros, self.scale

    def codes(self, rows: Rows) -> Codes:
        """As `GroupLayout.codes`."""
        return np.ascontiguousarray(self._of(self.qweight, rows).T)

    def zeros(self, rows: Rows) -> Zeros:
        """As `GroupLayout.zeros`."""
        return self._of(self.qzeros, rows).T.astype(np.int32)

    def scales(self, rows: Rows) -> Floats:
        """As `GroupLayout.scales`."""
        return self.scale.floats(_columns(self.scale.values, rows)).T

    def _of(self, array: StoredArray, rows: Rows) -> Codes:
        first = int(rows.min()) // 8
        words = _bytes_of(array.values[:, first : self.shape.words(int(rows.max()) + 1)])
        shuffled = _unpacked(words, 4).reshape(*words.shape[:2], 8)
        out = np.empty_like(shuffled)
        out[..., _AWQ_ORDER] = shuffled
        return _columns(out.reshape(len(words), -1), rows - 8 * first)


@dataclass(frozen=True, slots=True)
class CompressedLayout:
    """Codes by rows: words along columns, or plain int8. Zero points, if any, packed along rows."""

    shape: LayerShape
    weight: StoredArray
    scale: StoredArray
    zero_point: StoredArray | None

    @property
    def arrays(self) -> tuple[StoredArray, ...]:
        """As `GroupLayout.arrays`."""
        zero_point = () if self.zero_point is None else (self.zero_point,)
        return self.weight, self.scale, *zero_point

    def codes(self, rows: Rows) -> Codes:
        """As `GroupLayout.codes`."""
        part = self.weight.values[rows]
        if self.weight.dtype == "I8":
            return part.view(np.uint8) ^ np.uint8(0x80)
        codes = _unpacked(_bytes_of(part), self.shape.bits).reshape(len(rows), -1)
        return np.ascontiguousarray(codes[:, : self.shape.columns])

    def zeros(self, rows: Rows) -> Zeros:
        """As `GroupLayout.zeros`."""
        middle = np.int32(1 << self.shape.bits - 1)
        groups = self.shape.groups
        if self.zero_point is None:
            return np.full((len(rows), groups), middle, np.int32)
        values = self.zero_point.values
        if self.zero_point.dtype == "I8":
            return values[rows].astype(np.int32) + middle
        words = _bytes_of(values).swapaxes(0, 1)
        zeros = _unpacked(words, self.shape.bits).reshape(groups, -1)
        return zeros[:, rows].T.astype(np.int32)

    def scales(self, rows: Rows) -> Floats:
        """As `GroupLayout.scales`."""
        return self.scale.floats(self.scale.values[rows])


def group_layout(
    quantization: Quantization, shape: LayerShape, array: Callable[[str], StoredArray]
) -> GroupLayout:
    """The layout of a layer whose array of a role (see `group_roles`) is array(role).

    Raises StartupError when an array has another dtype or shape.
    """
    rows, columns, groups = shape.rows, shape.columns, shape.groups
    if quantization.storage in ("gptq", "awq"):
        gptq = quantization.storage == "gptq"
        packed = (shape.words(columns), rows) if gptq else (columns, shape.words(rows))
        qweight = array("qweight").check(("I32",), packed)
        qzeros = array("qzeros").check(("I32",), (groups, shape.words(rows)))
        scale = array("scales").check(FLOAT_DTYPES, (groups, rows))
        if gptq:
            return GptqLayout(shape, qweight, qzeros, scale, quantization.zero_shift)
        return AwqLayout(shape, qweight, qzeros, scale)
    scale = array("weight_scale").check(FLOAT_DTYPES, (rows, groups))
    if quantization.storage == "packed":
        weight = array("weight_packed").check(("I32",), (rows, shape.words(columns)))
        _check_weight_shape(array("weight_shape"), shape, quantization)
    else:
        weight = array("weight").check(("I8",), (rows, columns))
    zero_point = None
    if not quantization.symmetric:
        zero_point = array("weight_zero_point")
        plain = zero_point.dtype == "I8"
        zero_point.check(("I8", "I32"), (rows if plain else shape.words(rows), groups))
    return CompressedLayout(shape, weight, scale, zero_point)


def group_roles(quantization: Quantization) -> tuple[str, ...]:
    """The last parts of the names of a quantised layer's arrays."""
    match quantization.storage:
        case "gptq":
            return ("qweight", "qzeros", "scales", *(("g_idx",) if quantization.act_order else ()))
        case "awq":
            return ("qweight", "qzeros", "scales")
        case "packed":
            roles = ["weight_packed", "weight_scale", "weight_shape"]
        case "int8" | "float8":
            roles = ["weight", "weight_scale"]
        case "float8_inverse":
            roles = ["weight", "weight_scale_inv"]
    if not quantization.symmetric:
        roles.append("weight_zero_point")
    if quantization.act_order:
        roles.append("weight_g_idx")
    return tuple(roles)


def _check_weight_shape(array: StoredArray, shape: LayerShape, quantization: Quantization) -> None:
    stored = array.check(("I64", "I32"), (2,)).values.tolist()
    if stored != [shape.rows, shape.columns]:
        raise quantization.refused(
            f"tensor {array.name} says {stored}, the model needs {[shape.rows, shape.columns]}"
        )


def _columns(values: npt.NDArray[Any], rows: Rows) -> npt.NDArray[Any]:
    """values[:, rows]; a view where they follow one another, which most do."""
    first = int(rows[0])
    if np.array_equal(rows, np.arange(first, first + len(rows))):
        return values[:, first : first + len(rows)]
    return values[:, rows]


def _bytes_of(words: Stored) -> Codes:
    """int32 [a, b] -> [a, b, 4], lowest byte first; a copy unless they lie so."""
    return np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)


def _unpacked(raw: Codes, bits: int) -> Codes:
    """Bytes [..., n] -> codes [..., n, 8 / bits], a new C-contiguous array."""
    if bits == 8:
        return raw.copy(order="C")[..., None]
    out = np.empty((*raw.shape, 2), np.uint8)
    np.bitwise_and(raw, 15, out=out[..., 0])
    np.right_shift(raw, 4, out=out[..., 1])
    return out
