"""Shared memory as the rings have it: pinned for the device, and reached by it."""

import mmap
import os
from collections.abc import Iterator

import pytest
import torch

from triptych.services.executor.device.cuda_device import CudaDevice


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    device = CudaDevice(0)
    yield device
    device.close()


@pytest.fixture
def ring() -> memoryview:
    """A memfd, mapped shared, its pages in place. It stays mapped while a tensor is over it."""
    descriptor = os.memfd_create("ring")
    os.ftruncate(descriptor, 1 << 22)
    mapped = mmap.mmap(descriptor, 1 << 22)
    os.close(descriptor)
    view = memoryview(mapped)
    view[:] = bytes(1 << 22)
    return view


def test_a_ring_is_pinned_and_written_by_the_device(device: CudaDevice, ring: memoryview) -> None:
    pinned = device.register_host(ring)
    source = device.empty((3, 1000), torch.float32)
    device.run(source.normal_)
    host = device.host_view(ring[4096:], (3, 1000), torch.float32)
    device.download(source, host)
    device.record().wait()
    assert torch.equal(host, source.cpu())
    if pinned:
        device.unregister_host(ring)
    else:
        pytest.skip("the driver of this machine does not pin shared memory: copied, but slower")


def test_a_ring_can_be_pinned_again(device: CudaDevice, ring: memoryview) -> None:
    first = device.register_host(ring)
    device.unregister_host(ring)
    assert device.register_host(ring) == first
    device.unregister_host(ring)
