"""A device on the CPU whose work is done by a thread, in order, later: what a GPU does.

It shows in a test what a GPU would not: work that reads what is not computed yet, memory that is
used after it went, graphs whose work is no longer what was captured. All of these are
EmulationError; see `emulated_trace` for what is watched within work.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import psutil
import torch

from triptych.services.executor.device.device import (
    DeviceMemoryError,
    Event,
    Graph,
    MemoryFacts,
    Work,
)
from triptych.services.executor.device.emulated_stream import EmulatedEvent, EmulatedStream
from triptych.services.executor.device.emulated_trace import (
    EmulationError,
    Launches,
    Purpose,
    Trace,
    active_trace,
)
from triptych.services.executor.device.host_memory import address_of, host_view

_USUAL_MEMORY = 4 << 30
_POISONED_BYTES = 1 << 20  # at most: larger tensors would take long, and memory that nobody uses

_FREE_CALLS = frozenset(
    {
        "__get__", "__len__", "as_strided", "chunk", "contiguous", "data_ptr", "detach",
        "dim", "element_size", "expand", "expand_as", "is_contiguous", "is_floating_point",
        "movedim", "narrow", "numel", "permute", "select", "size", "split", "squeeze",
        "storage_offset", "stride", "t", "transpose", "unbind", "unflatten", "unsqueeze",
        "untyped_storage", "view", "view_as",
    }
)  # fmt: skip
"""Torch calls that look at a tensor's form only: right at any time."""
_HOST_CALLS = frozenset({"numpy", "__array__", "__dlpack__"})
"""Torch calls that a tensor of a GPU never answers."""


class DeviceTensor(torch.Tensor):
    """A tensor on an emulated device, as threads other than the stream's see it."""

    stream: ClassVar["weakref.ref[EmulatedStream] | None"] = None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Compute where that is right at this moment; else raise EmulationError."""
        name = getattr(func, "__name__", "")
        stream = cls.stream() if cls.stream is not None else None
        if stream is not None:
            if name in _HOST_CALLS:
                raise EmulationError(f"{name}: a tensor on a device has none; download it")
            if not (name in _FREE_CALLS or _is_view(name, args)) and not stream.idle:
                raise EmulationError(f"{name}: on a tensor of a device that has work queued")
        compute: Callable[..., object] = super().__torch_function__
        return compute(func, types, args, kwargs or {})


def _is_view(name: str, args: tuple[object, ...]) -> bool:
    """Whether it is an index that only takes a part."""
    if name != "__getitem__":
        return False
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return all(part is None or part is ... or isinstance(part, int | slice) for part in index)


class _EmulatedGraph:
    """As `Graph`."""

    def __init__(self, stream: EmulatedStream, work: Work, launches: Launches) -> None:
        self._stream = stream
        self._work = work
        self._launches = launches

    def replay(self) -> None:
        """As `Graph.replay`."""
        self._stream.put(self._replay)

    def _replay(self) -> None:
        if self._launches.memory_is_gone():
            raise EmulationError("a graph names memory that was given back since its capture")
        Trace(Purpose.REPLAY, self._launches).call(self._work)


class EmulatedDevice:
    """As `Device`, on the CPU."""

    def __init__(self, memory: int | None = None, work_seconds: float = 0.0) -> None:
        """`memory` is what it has, in bytes (None: 4 GiB, or half of what is available). Each thing
        that is queued takes `work_seconds` longer than it does."""
        if memory is None:
            memory = min(_USUAL_MEMORY, psutil.virtual_memory().available // 2)
        self._total = memory
        self._taken = 0
        self._peak = 0
        self._lock = threading.Lock()
        self._registered: dict[int, int] = {}
        self._stream = EmulatedStream(work_seconds)
        # Its own type, so that a tensor knows the device that it is on.
        self._tensor = type("DeviceTensor", (DeviceTensor,), {"stream": weakref.ref(self._stream)})

    @property
    def kind(self) -> str:
        """As `Device.kind`."""
        return "emulated"

    @property
    def name(self) -> str:
        """As `Device.name`."""
        return "emulated on the CPU"

    @property
    def torch_device(self) -> torch.device:
        """As `Device.torch_device`."""
        return torch.device("cpu")

    @property
    def capability(self) -> tuple[int, int]:
        """As `Device.capability`."""
        return (0, 0)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """As `Device.empty`; floats are NaN, so that reading before writing shows."""
        tensor = self._allocate(torch.empty, shape, dtype)
        if dtype.is_floating_point and tensor.nbytes <= _POISONED_BYTES:
            tensor.fill_(float("nan"))
        return tensor.as_subclass(self._tensor)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """As `Device.zeros`."""
        return self._allocate(torch.zeros, shape, dtype).as_subclass(self._tensor)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """As `Device.pinned`."""
        try:
            return torch.zeros(tuple(shape), dtype=dtype)
        except RuntimeError as error:
            raise DeviceMemoryError(f"host memory for a tensor of shape {shape}") from error

    def host_view(
        self, memory: memoryview, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """As `Device.host_view`."""
        return host_view(memory, shape, dtype)

    def register_host(self, memory: memoryview) -> bool:
        """As `Device.register_host`."""
        address = address_of(memory)
        if address in self._registered:
            raise EmulationError("memory is registered twice")
        self._registered[address] = memory.nbytes
        return True

    def unregister_host(self, memory: memoryview) -> None:
        """As `Device.unregister_host`."""
        if not self._stream.idle:
            raise EmulationError("memory is unregistered while work is queued")
        if self._registered.pop(address_of(memory), None) != memory.nbytes:
            raise EmulationError("memory is unregistered that was not registered")

    def upload(self, host: torch.Tensor, target: torch.Tensor) -> None:
        """As `Device.upload`."""
        _check_copy(host, target)
        self._refuse_capture("upload")
        self._stream.put(lambda: _copy(target, host))

    def download(self, source: torch.Tensor, host: torch.Tensor) -> None:
        """As `Device.download`."""
        _check_copy(host, source)
        self._refuse_capture("download")
        self._stream.put(lambda: _copy(host, source))

    def run(self, work: Work) -> None:
        """As `Device.run`."""
        self._stream.put(lambda: Trace(Purpose.RUN).call(work))

    def record(self) -> Event:
        """As `Device.record`."""
        event = EmulatedEvent()
        stream = self._stream
        stream.put(lambda: event.pass_with(stream.take_failure()))
        return event

    def capture(self, work: Work) -> Graph:
        """As `Device.capture`."""
        self.synchronize()
        launches = Launches()
        self._stream.put(lambda: Trace(Purpose.CAPTURE, launches).call(work))
        self.synchronize()
        return _EmulatedGraph(self._stream, work, launches)

    def synchronize(self) -> None:
        """As `Device.synchronize`."""
        self.record().wait()

    def memory(self) -> MemoryFacts:
        """As `Device.memory`: tensors that it made; what work allocates is not counted."""
        with self._lock:
            taken, peak = self._taken, self._peak
        return MemoryFacts(
            free=self._total - taken, total=self._total, allocated=taken, reserved=taken, peak=peak
        )

    def reset_peak(self) -> None:
        """As `Device.reset_peak`."""
        with self._lock:
            self._peak = self._taken

    def trim(self) -> None:
        """As `Device.trim`: nothing is kept."""

    def close(self) -> None:
        """As `Device.close`."""
        if not self._stream.idle:
            raise EmulationError("the device is closed while work is queued")
        self._stream.close()

    def _refuse_capture(self, what: str) -> None:
        if active_trace() is not None:
            raise EmulationError(f"{what} within work")

    def _allocate(
        self, make: Callable[..., torch.Tensor], shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        trace = active_trace()
        if trace is not None and trace.purpose is not Purpose.RUN:
            raise EmulationError(f"memory of the device is taken in {trace.purpose.value}")
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        with self._lock:
            if self._taken + size > self._total:
                raise DeviceMemoryError(
                    f"out of memory: {size} bytes are asked for, {self._total - self._taken} of "
                    f"{self._total} are free"
                )
            self._taken += size
            self._peak = max(self._peak, self._taken)
        tensor = make(tuple(shape), dtype=dtype)
        weakref.finalize(tensor.untyped_storage(), self._give_back, size)
        return tensor

    def _give_back(self, size: int) -> None:
        with self._lock:
            self._taken -= size


def _copy(to: torch.Tensor, source: torch.Tensor) -> None:
    to.copy_(source)


def _check_copy(host: torch.Tensor, other: torch.Tensor) -> None:
    if host.shape != other.shape or host.dtype != other.dtype:
        raise EmulationError(
            f"a copy between {host.dtype} {tuple(host.shape)} and {other.dtype} "
            f"{tuple(other.shape)}"
        )
    if not (host.is_contiguous() and other.is_contiguous()):
        raise EmulationError("a copy of tensors that are not contiguous")
