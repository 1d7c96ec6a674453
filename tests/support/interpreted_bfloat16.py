"""bfloat16 in Triton's interpreter, as devices have it.

The interpreter holds bfloat16 as its bits in uint16: its `dot` multiplies those as numbers, and its
cast from float32 cuts them off instead of rounding to nearest even.
"""

import numpy as np
import numpy.typing as npt
import triton.language as tl
from triton.runtime import interpreter

_cast = interpreter.InterpreterBuilder.cast_impl
_dot = interpreter.InterpreterBuilder.create_dot


def _rounded(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    bits = values.astype(np.float32, copy=False).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (np.where(np.isnan(values), bits, rounded) >> np.uint32(16)).astype(np.uint16)


def _widened(handle: interpreter.TensorHandle) -> npt.NDArray[np.float32]:
    bits: npt.NDArray[np.uint16] = handle.data
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def install() -> None:
    """Put it right for every kernel that is interpreted from now on."""

    def cast_impl(
        self: interpreter.InterpreterBuilder, src: interpreter.TensorHandle, dst_type: tl.dtype
    ) -> interpreter.TensorHandle:
        source, target = src.dtype.scalar, dst_type.scalar
        if target == tl.bfloat16 and source == tl.float32:
            return interpreter.TensorHandle(_rounded(src.data), target)
        if source == tl.bfloat16:
            return interpreter.TensorHandle(
                _widened(src).astype(interpreter._get_np_dtype(target)), target
            )
        if target == tl.bfloat16:
            return interpreter.TensorHandle(_rounded(src.data.astype(np.float32)), target)
        return _cast(self, src, dst_type)

    def create_dot(
        self: interpreter.InterpreterBuilder,
        a: interpreter.TensorHandle,
        b: interpreter.TensorHandle,
        d: interpreter.TensorHandle,
        input_precision: object,
        max_num_imprecise_acc: object,
    ) -> interpreter.TensorHandle:
        if a.dtype.scalar == tl.bfloat16:
            a = interpreter.TensorHandle(_widened(a), tl.float32)
        if b.dtype.scalar == tl.bfloat16:
            b = interpreter.TensorHandle(_widened(b), tl.float32)
        return _dot(self, a, b, d, input_precision, max_num_imprecise_acc)

    interpreter.InterpreterBuilder.cast_impl = cast_impl
    interpreter.InterpreterBuilder.create_dot = create_dot
