"""What of the GPU's side can be shown without one: errors, pinning, refusals, calls of torch.cuda.

torch.cuda's functions are replaced by mocks that know the signatures of the real ones.
"""

import importlib.util
import sys
from subprocess import run
from types import SimpleNamespace
from unittest.mock import MagicMock, create_autospec

import pytest
import torch

from triptych.services.executor.device.cuda_device import CudaDevice, cuda_errors
from triptych.services.executor.device.device import (
    Device,
    DeviceError,
    DeviceLostError,
    DeviceMemoryError,
    MemoryFacts,
)
from triptych.services.executor.device.opening import open_device, why_no_cuda
from triptych.services.executor.device.pinned_memory import HostRegistration
from triptych.services.runtime.lifecycle import StartupError

DEVICE = torch.device("cuda", 0)


class FakeDriver:
    """Pins nothing, and remembers what it was asked to."""

    def __init__(self, result: int = 0) -> None:
        self.result = result
        self.pinned: dict[int, tuple[int, int]] = {}

    def cuMemHostRegister_v2(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        if self.result == 0:
            self.pinned[address] = (size, flags)
        return self.result

    def cuMemHostUnregister(self, address: int) -> int:  # noqa: N802
        return 0 if self.pinned.pop(address, None) else 713


@pytest.fixture
def mocked(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """torch.cuda without a device; a mock raises for arguments that the real function has not."""
    mocks = SimpleNamespace(sync=create_autospec(torch.cuda.synchronize))
    names = (
        "set_device", "Stream", "set_stream", "stream", "graph_pool_handle", "Event", "CUDAGraph",
        "graph", "mem_get_info", "memory_allocated", "memory_reserved", "max_memory_reserved",
        "reset_peak_memory_stats", "empty_cache",
    )  # fmt: skip
    for name in names:
        mock = create_autospec(getattr(torch.cuda, name))
        monkeypatch.setattr(torch.cuda, name, mock)
        setattr(mocks, name, mock)
    monkeypatch.setattr(torch.cuda, "synchronize", mocks.sync)
    for context in (mocks.stream, mocks.graph):
        context.return_value = MagicMock()
        context.return_value.__exit__.return_value = None
    return mocks


@pytest.fixture
def device(mocked: SimpleNamespace) -> CudaDevice:
    made = CudaDevice(0)
    made._device = torch.device("cpu")  # so that tensors can be made
    return made


def test_importing_it_calls_nothing_of_cuda() -> None:
    code = (
        "import triptych.services.executor.device.cuda_device, torch\n"
        "assert not torch.cuda.is_initialized()"
    )
    assert run([sys.executable, "-c", code], check=False).returncode == 0


def test_it_fills_the_protocol(device: CudaDevice, mocked: SimpleNamespace) -> None:
    as_device: Device = device
    assert as_device.kind == "cuda"
    stream = mocked.Stream.return_value
    mocked.set_stream.assert_called_once_with(stream)


def test_work_is_launched_at_once_on_the_stream(
    device: CudaDevice, mocked: SimpleNamespace
) -> None:
    seen: list[bool] = []
    entered = mocked.stream.return_value.__enter__

    def work() -> None:
        seen.append(torch.is_grad_enabled())
        entered.assert_called_once()

    device.run(work)
    assert seen == [False]
    mocked.stream.assert_called_with(mocked.Stream.return_value)


def test_copies_are_checked_and_made(device: CudaDevice) -> None:
    x, host = device.empty((2, 2), torch.float32), torch.ones(2, 2)
    device.upload(host, x)
    back = torch.zeros(2, 2)
    device.download(x, back)
    assert back.tolist() == [[1, 1], [1, 1]]
    for wrong in (torch.zeros(4), torch.zeros(2, 2, dtype=torch.int32), torch.zeros(4, 2)[::2]):
        with pytest.raises(AssertionError, match="a copy"):
            device.upload(wrong, x)
    assert device.zeros((3,), torch.int32).tolist() == [0, 0, 0]


def test_a_graph_is_captured_into_the_shared_pool(
    device: CudaDevice, mocked: SimpleNamespace
) -> None:
    called: list[int] = []
    graph = device.capture(lambda: called.append(1))
    assert called == [1]
    mocked.graph.assert_called_once_with(
        mocked.CUDAGraph.return_value,
        pool=mocked.graph_pool_handle.return_value,
        stream=mocked.Stream.return_value,
        capture_error_mode="thread_local",
    )
    graph.replay()
    mocked.CUDAGraph.return_value.replay.assert_called_once_with()


def test_events_and_ends(device: CudaDevice, mocked: SimpleNamespace) -> None:
    mocked.set_device.reset_mock()
    event = device.record()
    real = mocked.Event.return_value
    real.record.assert_called_once_with(mocked.Stream.return_value)
    real.query.return_value = False
    assert not event.done()
    event.wait()
    real.synchronize.assert_called_once_with()
    assert mocked.set_device.call_count == 2  # in whatever thread that was
    device.synchronize()
    device.trim()
    device.close()
    assert mocked.Stream.return_value.synchronize.call_count == 3


def test_memory(device: CudaDevice, mocked: SimpleNamespace) -> None:
    mocked.mem_get_info.return_value = (30, 100)
    mocked.memory_allocated.return_value = 40
    mocked.memory_reserved.return_value = 50
    mocked.max_memory_reserved.return_value = 60
    assert device.memory() == MemoryFacts(30, 100, 40, 50, 60)
    device.reset_peak()
    mocked.reset_peak_memory_stats.assert_called_once()


@pytest.mark.parametrize(
    ("raised", "lost", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"), False, DeviceMemoryError),
        (torch.AcceleratorError("CUDA error: out of memory"), False, DeviceMemoryError),
        (RuntimeError("Triton Error [CUDA]: out of memory"), False, DeviceMemoryError),
        (torch.AcceleratorError("CUDA error: invalid argument"), False, DeviceError),
        (torch.AcceleratorError("CUDA error: an illegal memory access"), True, DeviceLostError),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access"), True, DeviceLostError),
        (RuntimeError("shape mismatch"), False, RuntimeError),
        (DeviceError("as it is"), True, DeviceError),
        (ValueError("a bug"), True, ValueError),
    ],
)
def test_errors_have_their_type(
    mocked: SimpleNamespace, raised: Exception, lost: bool, expected: type[Exception]
) -> None:
    mocked.sync.side_effect = RuntimeError("CUDA error") if lost else None
    with pytest.raises(expected) as caught, cuda_errors(DEVICE):
        raise raised
    assert type(caught.value) is expected
    assert "\n" not in str(caught.value) or caught.value is raised


def test_memory_is_pinned_by_the_driver() -> None:
    driver = FakeDriver()
    registration = HostRegistration(driver)
    memory, other = memoryview(bytearray(64)), memoryview(bytes(32))
    assert registration.register(memory)
    assert registration.register(other)
    assert sorted(driver.pinned.values()) == [(32, 0x01 | 0x08), (64, 0x01)]
    registration.unregister(memory)
    registration.unregister(memory)  # it is not there any more
    assert list(driver.pinned.values()) == [(32, 0x09)]
    registration.close()
    assert driver.pinned == {}


def test_memory_that_is_not_pinned_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    driver = FakeDriver(result=801)
    registration = HostRegistration(driver)
    memory = memoryview(bytearray(64))
    assert [registration.register(memory) for _ in range(3)] == [False] * 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "error 801" in caplog.text
    registration.unregister(memory)
    registration.close()


def test_memory_that_is_not_unpinned_is_an_error() -> None:
    driver = FakeDriver()
    registration = HostRegistration(driver)
    memory = memoryview(bytearray(64))
    registration.register(memory)
    driver.pinned.clear()
    with pytest.raises(DeviceError, match="error 713"):
        registration.unregister(memory)


def with_cuda(monkeypatch: pytest.MonkeyPatch, **says: object) -> None:
    usual: dict[str, object] = {
        "is_available": True,
        "device_count": 2,
        "get_device_capability": (9, 0),
        "get_device_name": "NVIDIA H200",
    }
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name, value in {**usual, **says}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)


def test_what_keeps_a_process_from_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is a build without CUDA; install one" in (why_no_cuda(0, 1) or "")
    with_cuda(monkeypatch)
    assert why_no_cuda(1, 2) is None
    said = why_no_cuda(2, 4) or ""
    assert said.startswith("tensor_parallel_size 4, rank 2: this machine shows 2 CUDA devices")
    with_cuda(monkeypatch, get_device_capability=(7, 5), get_device_name="Tesla T4")
    assert why_no_cuda(0, 1) == "Tesla T4 has compute capability 7.5; 8.0 or later is needed"
    with_cuda(monkeypatch)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "triton is not installed" in (why_no_cuda(0, 1) or "")


def test_a_driver_that_finds_nothing_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cuda(monkeypatch, is_available=False)

    def init() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system.\nPlease check")

    monkeypatch.setattr(torch.cuda, "init", init)
    assert (
        why_no_cuda(0, 1) == "there is no CUDA device here: Found no NVIDIA driver on your system."
    )
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    assert why_no_cuda(0, 1) == "there is no CUDA device here: torch finds none"


def test_a_gpu_that_somebody_has_for_himself(
    monkeypatch: pytest.MonkeyPatch, mocked: SimpleNamespace
) -> None:
    with_cuda(monkeypatch)
    mocked.set_device.side_effect = torch.AcceleratorError("CUDA error: device is busy")
    with pytest.raises(StartupError, match=r"^device cuda, rank 1: CUDA error: device is busy"):
        open_device("cuda", 1, 2)


def test_opening_a_device() -> None:
    device = open_device("emulated")
    assert device.kind == "emulated"
    device.close()
    if torch.version.cuda is None:
        with pytest.raises(StartupError, match=r"^device cuda: torch .* is a build without CUDA"):
            open_device("cuda")
