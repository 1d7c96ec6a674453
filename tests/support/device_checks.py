"""What every Device does, as checks for an emulated one and for a GPU."""

import gc
import mmap
import os
import threading
from collections.abc import Callable

import pytest
import torch

from triptych.services.executor.device.device import Device, DeviceMemoryError

FLOAT = torch.float32


def values(device: Device, tensor: torch.Tensor) -> list[float]:
    """Of a tensor of the device, when all that is queued is done."""
    host = device.pinned(tuple(tensor.shape), tensor.dtype)
    device.download(tensor, host)
    device.synchronize()
    return [float(value) for value in host.flatten()]


def tensors(device: Device) -> None:
    x, y = device.zeros((2, 3), torch.bfloat16), device.empty((4,), torch.int32)
    assert (x.shape, x.dtype, x.device.type) == ((2, 3), torch.bfloat16, device.torch_device.type)
    assert (y.shape, y.dtype, y.is_contiguous()) == ((4,), torch.int32, True)
    assert values(device, x) == [0.0] * 6
    assert device.pinned((3,), FLOAT).tolist() == [0.0] * 3
    assert device.name


def work_in_order(device: Device) -> None:
    x = device.zeros((1 << 16,), FLOAT)
    source = device.pinned((1 << 16,), FLOAT)
    source.fill_(2.0)
    host = device.pinned((1 << 16,), FLOAT)
    device.upload(source, x)
    for _ in range(50):
        device.run(lambda: x.add_(1).mul_(1))
    device.download(x, host)
    event = device.record()
    for _ in range(50):
        device.run(lambda: x.mul_(0))
    event.wait()
    assert event.done()
    assert set(host.tolist()) == {52.0}
    device.synchronize()


def events_of_other_threads(device: Device) -> None:
    x, host = device.zeros((4,), FLOAT), device.pinned((4,), FLOAT)
    seen: list[float] = []
    for turn in range(20):
        device.run(lambda: x.add_(1))
        device.download(x, host)
        event = device.record()

        def read(event: Callable[[], None] = event.wait) -> None:
            event()
            seen.append(host[0].item())

        thread = threading.Thread(target=read)
        thread.start()
        thread.join(60)
        assert seen[turn] == turn + 1


def no_gradients(device: Device) -> None:
    x = device.zeros((1,), FLOAT).requires_grad_()
    seen: list[bool] = []
    device.run(lambda: seen.append((x * 2).requires_grad))
    device.synchronize()
    assert seen == [False]


def graphs(device: Device) -> None:
    """Captured from the largest on, replayed in any order, sharing memory for what they make."""
    x, out = device.zeros((64, 8), FLOAT), device.zeros((64, 8), FLOAT)
    weight = device.zeros((8, 8), FLOAT)
    device.upload(torch.eye(8) * 3, weight)

    def work(rows: int) -> Callable[[], object]:
        return lambda: out[:rows].copy_((x[:rows] + 1) @ weight)

    captured = {}
    for rows in (64, 16, 1):
        device.run(work(rows))
        device.run(out.zero_)
        captured[rows] = device.capture(work(rows))
    assert set(values(device, out)) == {0.0}  # captured, not computed
    for start, rows in ((1.0, 16), (2.0, 1), (4.0, 64), (7.0, 16)):
        device.upload(torch.full((64, 8), start), x)
        device.run(out.zero_)
        captured[rows].replay()
        got = values(device, out)
        assert got == [(start + 1) * 3] * (rows * 8) + [0.0] * ((64 - rows) * 8)


def shared_memory(device: Device) -> None:
    """Of a memfd, as rings are: pinned or not, read-only or not."""
    size = 1 << 20
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    with (
        mmap.mmap(fd, size, flags=mmap.MAP_SHARED) as ours,
        mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) as theirs,
    ):
        writable, readable = memoryview(ours), memoryview(theirs)
        device.register_host(writable)
        device.register_host(readable)
        x, y = device.zeros((1000,), FLOAT), device.zeros((1000,), FLOAT)
        device.run(lambda: x.add_(torch.arange(1000, device=x.device)))
        device.download(x, device.host_view(writable[4096:], (1000,), FLOAT))
        device.upload(device.host_view(readable[4096:], (1000,), FLOAT), y)
        assert values(device, y) == [float(number) for number in range(1000)]
        # What was refused, or is pinned no more, is copied all the same.
        device.unregister_host(readable)
        device.unregister_host(writable)
        device.download(x, device.host_view(writable[8192:], (1000,), FLOAT))
        device.synchronize()
        assert writable[8192:12192].cast("f").tolist() == [float(number) for number in range(1000)]
        gc.collect()
        writable.release()
        readable.release()
    os.close(fd)


def memory_facts(device: Device) -> None:
    gc.collect()
    device.trim()
    device.reset_peak()
    before = device.memory()
    assert 0 < before.free <= before.total
    size = 64 << 20
    x = device.zeros((size // 4,), FLOAT)
    during = device.memory()
    assert during.allocated - before.allocated == size
    assert during.peak >= before.reserved + size
    assert during.total == before.total
    del x
    gc.collect()
    device.trim()
    after = device.memory()
    assert (after.allocated, after.peak) == (before.allocated, during.peak)
    device.reset_peak()
    assert device.memory().peak < during.peak


def too_much_memory(device: Device) -> None:
    facts = device.memory()
    with pytest.raises(DeviceMemoryError, match="out of memory"):
        device.empty((facts.total,), FLOAT)
    x = device.zeros((2,), FLOAT)  # and it goes on
    device.run(lambda: x.add_(1))
    assert values(device, x) == [1.0, 1.0]


CHECKS = (
    tensors,
    work_in_order,
    events_of_other_threads,
    no_gradients,
    graphs,
    shared_memory,
    memory_facts,
    too_much_memory,
)
