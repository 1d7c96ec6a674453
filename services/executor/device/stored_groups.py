"""Stored matrices as codes and scales that a GPU's kernels take, without change of values.

int8 and int4 of groups, from checkpoints that are quantised (AWQ, GPTQ, compressed-tensors, GGUF's
Q8_0 and Q4_0) or by rounding floats as they load; e4m3 likewise. What is kept otherwise (K-quants,
groups that kernels do not have, columns in act order) has no such form: it is dequantised.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from triptych.kernels.reference.quantized_weights import Bits, group_supported
from triptych.services.executor.device.shard import MatrixPart
from triptych.services.executor.float8_tensor import Float8Tensor
from triptych.services.executor.group_tensor import GroupTensor
from triptych.services.executor.raw_weights import RawTensor, StoredTensor
from triptych.services.executor.rounding import EDGES, GROUP, bits_of, round_rows
from triptych.services.executor.stored_arrays import Floats
from triptych.services.runtime.gguf_file import TensorType
from triptych.services.runtime.lifecycle import StartupError

Codes = npt.NDArray[np.uint8]

FLOATS = (TensorType.F32, TensorType.F16, TensorType.BF16)
_GGUF_BITS: dict[TensorType, Bits] = {TensorType.Q8_0: 8, TensorType.Q4_0: 4}
_GGUF_GROUP = 32
_CHUNK_ELEMENTS = 1 << 22
_MIDDLES: dict[Bits, int] = {4: 8, 8: 0}
_LARGEST_FLOAT8 = 448.0


@dataclass(frozen=True, slots=True)
class IntCodes:
    """weight = scale * (code - zero): codes [rows, columns] (of 8 bits two's complement), scales
    float32 and zeros int32 [rows, groups] of `group` columns each."""

    bits: Bits
    group: int
    codes: Codes
    scales: Floats
    zeros: npt.NDArray[np.int32]

    @property
    def symmetric(self) -> bool:
        """Whether the zero points are the middle, all of them."""
        return bool((self.zeros == _MIDDLES[self.bits]).all())

    def of_group(self, group: int) -> "IntCodes":
        """The same in groups of a divisor of its own."""
        times = self.group // group
        scales: Floats = np.repeat(self.scales, times, 1)
        zeros: npt.NDArray[np.int32] = np.repeat(self.zeros, times, 1)
        return IntCodes(self.bits, group, self.codes, scales, zeros)


@dataclass(frozen=True, slots=True)
class Float8Codes:
    """weight = scale * value of e4m3: codes [rows, columns], scales float32 [rows, groups]."""

    group: int
    codes: Codes
    scales: Floats


def float8_rounded(tensor: RawTensor, part: MatrixPart) -> Float8Codes:
    """Floats rounded to e4m3, a scale an output: its largest magnitude becomes 448.

    The scale is of the whole row, whatever columns a rank has of it. Raises StartupError.
    """
    codes = np.empty((part.rows, part.columns), np.uint8)
    scales = np.empty((part.rows, 1), np.float32)
    for start, stop in _chunks(part):
        values = tensor.rows_as_floats(start, stop)
        if not np.isfinite(values).all():
            raise StartupError(f"{tensor.name}: weights that are not finite")
        row = slice(start - part.row_start, stop - part.row_start)
        largest = np.abs(values).max(1, keepdims=True)
        # A quotient that float32 cannot hold exactly enough would round to nothing or infinity.
        scale = np.maximum(largest / np.float32(_LARGEST_FLOAT8), np.finfo(np.float32).tiny)
        scales[row] = scale
        wanted = values[:, part.column_start : part.column_stop] / scale
        nearest = torch.from_numpy(wanted).clamp(-_LARGEST_FLOAT8, _LARGEST_FLOAT8)
        codes[row] = nearest.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return Float8Codes(0, codes, scales)


def int_rounded(tensor: RawTensor, part: MatrixPart, bits: Bits) -> IntCodes:
    """Floats rounded as `rounding` has it. Raises StartupError."""
    _check_cut(tensor.name, part, GROUP)
    groups = part.columns // GROUP
    codes = np.empty((part.rows, part.columns), np.uint8)
    scales = np.empty((part.rows, groups), np.float32)
    zeros = np.empty((part.rows, groups), np.int32)
    for start, stop in _chunks(part):
        values = tensor.rows_as_floats(start, stop)[:, part.column_start : part.column_stop]
        rounded = round_rows(tensor.name, np.ascontiguousarray(values), bits)
        row = slice(start - part.row_start, stop - part.row_start)
        codes[row] = rounded.codes.astype(np.int8).view(np.uint8)
        scales[row], zeros[row] = rounded.scales, rounded.zeros
    return IntCodes(bits, GROUP, codes, scales, zeros)


def stored_codes(tensor: StoredTensor, part: MatrixPart) -> IntCodes | Float8Codes | None:
    """What a quantised matrix of a checkpoint holds; None where kernels cannot take it as it is.

    Raises StartupError where a rank's columns cut a group.
    """
    match tensor:
        case GroupTensor():
            return _of_groups(tensor, part)
        case Float8Tensor():
            return _of_float8(tensor, part)
        case RawTensor() if tensor.type in _GGUF_BITS:
            return _of_gguf(tensor, part)
        case _:
            return None


def rounded_codes(
    tensor: StoredTensor, part: MatrixPart, rounding: str
) -> IntCodes | Float8Codes | None:
    """A matrix as it is stored, or rounded if it is of floats and `rounding` says so.

    int4 leaves embedding and head 8 bits, and fp8 leaves them alone: there it costs most.
    """
    if not (isinstance(tensor, RawTensor) and tensor.type in FLOATS):
        return stored_codes(tensor, part)
    match rounding:
        case "fp8" if part.parameter not in EDGES:
            return float8_rounded(tensor, part)
        case "int8" | "int4":
            return int_rounded(tensor, part, bits_of(part.parameter, rounding))
        case _:
            return None


def kernel_group(bits: Bits, group: int) -> int | None:
    """The largest group that divides this one and that kernels have; None if there is none."""
    if group_supported(bits, group):
        return group
    return next((each for each in (128, 64, 32) if group % each == 0), None)


def _of_groups(tensor: GroupTensor, part: MatrixPart) -> IntCodes | None:
    if tensor.column_order is not None:
        return None
    bits: Bits = 4 if tensor.bits == 4 else 8
    whole = tensor.group_size == tensor.columns
    group = part.columns if whole else kernel_group(bits, tensor.group_size)
    if group is None:
        return None
    if not whole:
        _check_cut(tensor.name, part, tensor.group_size)
    size = tensor.group_size
    first, last = part.column_start // size, -(-part.column_stop // size)
    codes = np.empty((part.rows, part.columns), np.uint8)
    scales = np.empty((part.rows, last - first), np.float32)
    zeros = np.empty((part.rows, last - first), np.int32)
    for start, stop in _chunks(part):
        row = slice(start - part.row_start, stop - part.row_start)
        all_codes, all_scales, all_zeros = tensor.groups(start, stop)
        codes[row] = all_codes[:, part.column_start : part.column_stop]
        scales[row], zeros[row] = all_scales[:, first:last], all_zeros[:, first:last]
    if bits == 8:
        codes ^= np.uint8(0x80)
        zeros -= 128
    if whole:
        return IntCodes(bits, part.columns, codes, scales, zeros)
    return IntCodes(bits, size, codes, scales, zeros).of_group(group)


def _of_float8(tensor: Float8Tensor, part: MatrixPart) -> Float8Codes | None:
    if tensor.block is not None:
        if tensor.block[1] != 128:
            return None
        _check_cut(tensor.name, part, 128)
    codes = tensor.codes(part.row_start, part.row_stop)[:, part.column_start : part.column_stop]
    scales = tensor.row_scales(part.row_start, part.row_stop)
    if tensor.block is None:
        return Float8Codes(0, codes, scales)
    groups = slice(part.column_start // 128, -(-part.column_stop // 128))
    return Float8Codes(128, codes, scales[:, groups])


def _of_gguf(tensor: RawTensor, part: MatrixPart) -> IntCodes:
    """Blocks of 32: a float16 scale, then int8, or nibbles of columns i (low) and 16 + i (high)."""
    _check_cut(tensor.name, part, _GGUF_GROUP)
    bits = _GGUF_BITS[tensor.type]
    raw = tensor.bytes_of(part.row_start, part.row_stop).reshape(part.rows, -1, 2 + 4 * bits)
    raw = raw[:, part.column_start // _GGUF_GROUP : part.column_stop // _GGUF_GROUP]
    scales = np.ascontiguousarray(raw[..., :2]).view(np.float16)[..., 0].astype(np.float32)
    if not np.isfinite(scales).all():
        raise StartupError(f"{tensor.name}: a scale is not a finite number")
    codes = raw[..., 2:]
    if bits == 4:
        codes = np.concatenate((codes & 15, codes >> 4), -1)
    zeros = np.full(scales.shape, _MIDDLES[bits], np.int32)
    return IntCodes(bits, _GGUF_GROUP, codes.reshape(part.rows, -1), scales, zeros)


def _check_cut(name: str, part: MatrixPart, group: int) -> None:
    if part.column_start % group or (
        part.column_stop % group and part.column_stop != part.shape[1]
    ):
        raise StartupError(
            f"{name}: columns {part.column_start} to {part.column_stop} of a rank cut its groups "
            f"of {group} columns: take another tensor_parallel_size"
        )


def _chunks(part: MatrixPart) -> Iterator[tuple[int, int]]:
    """Rows of the stored matrix, some at a time."""
    step = max(1, _CHUNK_ELEMENTS // part.shape[1])
    for start in range(part.row_start, part.row_stop, step):
        yield start, min(start + step, part.row_stop)
