"""What the plan of a GPU needs of one: memory, one in-order stream, events, graphs.

`CudaDevice` is a GPU. `EmulatedDevice` is the same state machine on the CPU, where work is done by
a thread, later, and where what a GPU would silently compute wrong is an error. To add another
accelerator (ROCm, XPU): a module with a class that fills `Device`, and a case in `open_device`.

One thread launches (it opened the device); any thread may wait for an event.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from triptych.services.executor.device.errors import (
    DeviceError,
    DeviceLostError,
    DeviceMemoryError,
)

Work = Callable[[], object]
"""Torch calls on tensors of a device, and kernel launches, which read nothing of what they compute.
What it returns is dropped."""


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Memory of the device, in bytes.

    free: what nobody has. total: all there is. allocated: what tensors of this process take.
    reserved: what this process took from the device for tensors, those that are gone included.
    peak: the most that was reserved at once since `reset_peak`.
    """

    free: int
    total: int
    allocated: int
    reserved: int
    peak: int


class Event(Protocol):
    """A point of the stream."""

    def wait(self) -> None:
        """Until all work before the point is done. Any thread, without holding the GIL.

        Raises DeviceError when some of it failed that no earlier event has reported.
        """

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""


class Graph(Protocol):
    """Work that was captured: its launches, with the addresses and numbers of that time."""

    def replay(self) -> None:
        """Queue all of it at once; the launching thread."""


class Device(Protocol):
    """One accelerator.

    Tensors that it makes are contiguous and on `torch_device`. Torch calls on them belong into
    `run` (or `capture`): elsewhere they are only right while nothing is queued.
    """

    @property
    def kind(self) -> str:
        """ "cuda" or "emulated"."""

    @property
    def name(self) -> str:
        """Of the hardware, for people."""

    @property
    def torch_device(self) -> torch.device:
        """Where its tensors are."""

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability, like (9, 0); (0, 0) of an emulated device."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor on the device, its contents not defined. Raises DeviceMemoryError."""

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor on the device, zero. Raises DeviceMemoryError."""

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in host memory, zero, that copies reach without a detour.

        Raises DeviceMemoryError when the host has no room for it.
        """

    def host_view(
        self, memory: memoryview, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Host memory as a tensor, without copying; for `upload` and `download`.

        The caller sees to it that the memory outlives the tensor, and writes to read-only memory
        are not made. Raises ValueError when `memory` is smaller than the shape.
        """

    def register_host(self, memory: memoryview) -> bool:
        """Pin the pages of mapped memory (it starts on a page border), so that copies to and from
        it need no detour. False, with one warning in the log, where the device will not: copies
        work all the same, slower.
        """

    def unregister_host(self, memory: memoryview) -> None:
        """Undo `register_host`, before the memory is unmapped; nothing where that was refused.
        No copy to or from it may be queued."""

    def upload(self, host: torch.Tensor, target: torch.Tensor) -> None:
        """Queue a copy from host memory, of the same shape and dtype, both contiguous.

        `host` must stay as it is until the copy is done.
        """

    def download(self, source: torch.Tensor, host: torch.Tensor) -> None:
        """Queue a copy to host memory, of the same shape and dtype, both contiguous.

        `host` holds it when an event is done that is recorded after this.
        """

    def run(self, work: Work) -> None:
        """Queue work. On a GPU `work` is called at once, and its launches are what is queued; the
        emulated device calls it later: it depends on nothing that changes in between."""

    def record(self) -> Event:
        """The point of the stream behind all that is queued so far."""

    def capture(self, work: Work) -> Graph:
        """A graph of the launches of `work`, none of which is executed now.

        All graphs share one pool for what `work` allocates, which is gone when it returns: its
        results go to tensors that were there before. `work` must have run once before, so that its
        kernels are compiled. Raises DeviceMemoryError, and DeviceError when it cannot be captured.
        """

    def synchronize(self) -> None:
        """Until everything queued is done. Raises as `Event.wait`."""

    def memory(self) -> MemoryFacts:
        """The device's memory now."""

    def reset_peak(self) -> None:
        """Let MemoryFacts.peak begin anew."""

    def trim(self) -> None:
        """Give memory back that no tensor takes."""

    def close(self) -> None:
        """End threads, and let go of what is pinned. Nothing may be queued."""


__all__ = [
    "Device",
    "DeviceError",
    "DeviceLostError",
    "DeviceMemoryError",
    "Event",
    "Graph",
    "MemoryFacts",
    "Work",
]
