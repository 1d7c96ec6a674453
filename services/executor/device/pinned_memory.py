"""Pins mapped memory for a GPU, by its driver."""

import ctypes
import logging
from typing import Protocol

from triptych.services.executor.device.errors import DeviceError
from triptych.services.executor.device.host_memory import address_of

# CU_MEMHOSTREGISTER_*: of the driver's interface.
_REGISTER_PORTABLE = 0x01
_REGISTER_READ_ONLY = 0x08
_SUCCESS = 0

_log = logging.getLogger(__name__)


class HostRegistration:
    """Pins mapped memory, by the driver's own interface.

    Not cudaHostRegister: where that is refused, the runtime remembers the error, and torch raises
    it at its next kernel launch, whatever that is. The driver remembers nothing.
    """

    def __init__(self, library: "Driver") -> None:
        self._library = library
        self._addresses: set[int] = set()
        self._warned = False

    def register(self, memory: memoryview) -> bool:
        """As `Device.register_host`."""
        address = address_of(memory)
        flags = _REGISTER_PORTABLE | (_REGISTER_READ_ONLY if memory.readonly else 0)
        result = self._library.cuMemHostRegister_v2(address, memory.nbytes, flags)
        if result == _SUCCESS:
            self._addresses.add(address)
            return True
        if not self._warned:
            self._warned = True
            _log.warning(
                "the driver does not pin %d bytes of shared memory (error %d): copies to and from "
                "it are slower",
                memory.nbytes,
                result,
            )
        return False

    def unregister(self, memory: memoryview) -> None:
        """As `Device.unregister_host`."""
        address = address_of(memory)
        if address in self._addresses:
            self._addresses.remove(address)
            self._unregister(address)

    def close(self) -> None:
        """Unpin what is pinned."""
        while self._addresses:
            self._unregister(self._addresses.pop())

    def _unregister(self, address: int) -> None:
        result = self._library.cuMemHostUnregister(address)
        if result != _SUCCESS:
            raise DeviceError(f"the driver does not unpin shared memory (error {result})")


class Driver(Protocol):
    """The part of libcuda that pins memory; each answers with a CUresult."""

    def cuMemHostRegister_v2(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        """Pin pages."""

    def cuMemHostUnregister(self, address: int) -> int:  # noqa: N802
        """Unpin them."""


class Libcuda:
    """As `Driver`: the library that the driver installed."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        self._register = library.cuMemHostRegister_v2
        self._register.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
        self._unregister = library.cuMemHostUnregister
        self._unregister.argtypes = (ctypes.c_void_p,)

    def cuMemHostRegister_v2(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        """As `Driver`."""
        return int(self._register(address, size, flags))

    def cuMemHostUnregister(self, address: int) -> int:  # noqa: N802
        """As `Driver`."""
        return int(self._unregister(address))
