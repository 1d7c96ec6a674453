"""A GPU as a Device, by torch.cuda. Nothing here calls CUDA when it is imported."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from triptych.services.executor.device.device import (
    DeviceError,
    DeviceLostError,
    DeviceMemoryError,
    Event,
    Graph,
    MemoryFacts,
    Work,
)
from triptych.services.executor.device.host_memory import host_view
from triptych.services.executor.device.pinned_memory import HostRegistration, Libcuda


class CudaDevice:
    """As `Device`. Made by the thread that launches, whose torch calls go to its stream."""

    def __init__(self, index: int) -> None:
        """Device `index` of those that this process sees; `opening.why_no_cuda` has no objection.

        Raises DeviceError when it cannot be used (taken by another process alone, for instance).
        """
        self._device = torch.device("cuda", index)
        with cuda_errors(self._device):
            torch.cuda.set_device(self._device)
            self._stream = torch.cuda.Stream(self._device)
            # What this thread does beside `run` (reading weights) is in order with the work.
            torch.cuda.set_stream(self._stream)
            self._pool = torch.cuda.graph_pool_handle()
        self._registration: HostRegistration | None = None

    @property
    def kind(self) -> str:
        """As `Device.kind`."""
        return "cuda"

    @property
    def name(self) -> str:
        """As `Device.name`."""
        return torch.cuda.get_device_name(self._device)

    @property
    def torch_device(self) -> torch.device:
        """As `Device.torch_device`."""
        return self._device

    @property
    def capability(self) -> tuple[int, int]:
        """As `Device.capability`."""
        return torch.cuda.get_device_capability(self._device)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """As `Device.empty`."""
        with cuda_errors(self._device), torch.cuda.stream(self._stream):
            return torch.empty(tuple(shape), dtype=dtype, device=self._device)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """As `Device.zeros`."""
        with cuda_errors(self._device), torch.cuda.stream(self._stream):
            return torch.zeros(tuple(shape), dtype=dtype, device=self._device)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """As `Device.pinned`."""
        with cuda_errors(self._device):
            return torch.zeros(tuple(shape), dtype=dtype, pin_memory=True)

    def host_view(
        self, memory: memoryview, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """As `Device.host_view`."""
        return host_view(memory, shape, dtype)

    def register_host(self, memory: memoryview) -> bool:
        """As `Device.register_host`."""
        if self._registration is None:
            self._registration = HostRegistration(Libcuda())
        return self._registration.register(memory)

    def unregister_host(self, memory: memoryview) -> None:
        """As `Device.unregister_host`."""
        if self._registration is not None:
            self._registration.unregister(memory)

    def upload(self, host: torch.Tensor, target: torch.Tensor) -> None:
        """As `Device.upload`."""
        _check_copy(host, target)
        with cuda_errors(self._device), torch.cuda.stream(self._stream), torch.no_grad():
            target.copy_(host, non_blocking=True)

    def download(self, source: torch.Tensor, host: torch.Tensor) -> None:
        """As `Device.download`."""
        _check_copy(host, source)
        with cuda_errors(self._device), torch.cuda.stream(self._stream), torch.no_grad():
            host.copy_(source, non_blocking=True)

    def run(self, work: Work) -> None:
        """As `Device.run`."""
        with cuda_errors(self._device), torch.cuda.stream(self._stream), torch.no_grad():
            work()

    def record(self) -> Event:
        """As `Device.record`."""
        event = torch.cuda.Event()
        with cuda_errors(self._device):
            event.record(self._stream)
        return _CudaEvent(event, self._device)

    def capture(self, work: Work) -> Graph:
        """As `Device.capture`."""
        graph = torch.cuda.CUDAGraph()
        # "thread_local": what other threads ask of CUDA meanwhile does not break the capture.
        with (
            cuda_errors(self._device),
            torch.no_grad(),
            torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ),
        ):
            work()
        return _CudaGraph(graph, self._stream, self._device)

    def synchronize(self) -> None:
        """As `Device.synchronize`."""
        with cuda_errors(self._device):
            self._stream.synchronize()

    def memory(self) -> MemoryFacts:
        """As `Device.memory`."""
        with cuda_errors(self._device):
            free, total = torch.cuda.mem_get_info(self._device)
            return MemoryFacts(
                free=free,
                total=total,
                allocated=torch.cuda.memory_allocated(self._device),
                reserved=torch.cuda.memory_reserved(self._device),
                peak=torch.cuda.max_memory_reserved(self._device),
            )

    def reset_peak(self) -> None:
        """As `Device.reset_peak`."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def trim(self) -> None:
        """As `Device.trim`."""
        with cuda_errors(self._device):
            self._stream.synchronize()
            torch.cuda.empty_cache()

    def close(self) -> None:
        """As `Device.close`."""
        self.synchronize()
        if self._registration is not None:
            self._registration.close()


class _CudaEvent:
    """As `Event`."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def wait(self) -> None:
        """As `Event.wait`."""
        self._name_device()
        with cuda_errors(self._device):
            self._event.synchronize()

    def done(self) -> bool:
        """As `Event.done`."""
        self._name_device()
        with cuda_errors(self._device):
            return bool(self._event.query())

    def _name_device(self) -> None:
        """A thread's first call of CUDA opens its current device: not that of another rank."""
        torch.cuda.set_device(self._device)


class _CudaGraph:
    """As `Graph`."""

    def __init__(
        self, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, device: torch.device
    ) -> None:
        self._graph = graph
        self._stream = stream
        self._device = device

    def replay(self) -> None:
        """As `Graph.replay`."""
        with cuda_errors(self._device), torch.cuda.stream(self._stream):
            self._graph.replay()


@contextmanager
def cuda_errors(device: torch.device) -> Iterator[None]:
    """What torch and Triton raise of CUDA within, as the errors that `Device` names."""
    try:
        yield
    except DeviceError:
        raise
    except RuntimeError as error:
        said = str(error).strip().partition("\n")[0]
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in said:
            raise DeviceMemoryError(said) from error
        if not (isinstance(error, torch.AcceleratorError) or "CUDA" in said):
            raise
        if _is_lost(device):
            raise DeviceLostError(said) from error
        raise DeviceError(said) from error


def _is_lost(device: torch.device) -> bool:
    """Whether CUDA answers everything with an error from now on: then so it does this."""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def _check_copy(host: torch.Tensor, other: torch.Tensor) -> None:
    """What torch would do another way: with a copy of its own, synchronously."""
    assert host.shape == other.shape, "a copy between shapes"
    assert host.dtype == other.dtype, "a copy between dtypes"
    assert host.is_contiguous(), "a copy of a tensor that is not contiguous"
    assert other.is_contiguous(), "a copy of a tensor that is not contiguous"
