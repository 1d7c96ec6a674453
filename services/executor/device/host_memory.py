"""Mapped host memory as torch sees it."""

from collections.abc import Sequence

import numpy as np
import torch


def address_of(memory: memoryview) -> int:
    """Where it begins."""
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def host_view(memory: memoryview, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory as a tensor on the CPU, without copying; it is mapped as long as the tensor lives.

    Read-only memory must not be written to through it. Raises ValueError when `memory` is smaller
    than the shape.
    """
    count = int(np.prod(shape, dtype=np.int64))
    if memory.nbytes < count * dtype.itemsize:
        raise ValueError(f"{memory.nbytes} bytes do not hold {tuple(shape)} of {dtype}")
    array = np.asarray(_Writable(memory))[: count * dtype.itemsize]
    return torch.from_numpy(array).view(dtype).reshape(tuple(shape))


class _Writable:
    """Memory, read-only or not, as what torch takes silently: it knows no read-only tensors.

    The array that numpy makes of this holds it, and with it the memory.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self.__array_interface__ = {
            "data": (address_of(memory), False),
            "shape": (memory.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }
