"""CudaDevice on a GPU: what every device does, and what only a GPU can show."""

import mmap
from collections.abc import Callable, Iterator

import pytest
import torch

from device_checks import CHECKS, values
from triptych.services.executor.device.device import Device
from triptych.services.executor.device.opening import open_device


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    opened = open_device("cuda")
    yield opened
    opened.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_what_every_device_does(device: Device, check: Callable[[Device], None]) -> None:
    check(device)


def test_a_launch_does_not_wait_for_the_device(device: Device) -> None:
    x = device.zeros((4096, 4096), torch.float32)
    device.run(lambda: x @ x)  # whatever is done once
    device.synchronize()
    for _ in range(50):
        device.run(lambda: x @ x)
    event = device.record()
    assert not event.done()
    event.wait()
    assert event.done()


def test_memory_that_the_driver_will_not_pin_leaves_no_error_behind(device: Device) -> None:
    """torch raises what the runtime remembers at its next launch, whatever that is."""
    x = device.zeros((2,), torch.float32)
    with mmap.mmap(-1, mmap.PAGESIZE) as mapping:
        memory = memoryview(mapping)
        assert device.register_host(memory)
        assert not device.register_host(memory)  # it is pinned already
        device.run(lambda: x.add_(1))
        assert values(device, x) == [1.0, 1.0]
        device.unregister_host(memory)
        memory.release()


def test_graphs_take_memory_once(device: Device) -> None:
    """What one graph makes on its way, the next one makes in the same place."""
    x = device.zeros((1 << 22,), torch.float32)
    reserved = []
    for _ in range(4):
        device.capture(lambda: x.copy_((x + 1) * 2)).replay()
        device.synchronize()
        reserved.append(device.memory().reserved)
    assert reserved[-1] == reserved[0]
