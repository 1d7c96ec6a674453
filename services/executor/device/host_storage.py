"""Blocks that a device has no room for, in pinned host memory, and the copies to and from there."""

from collections.abc import Iterator, Sequence
from math import prod

import torch

from triptych.services.executor.device.device import Device, DeviceMemoryError, Work
from triptych.services.executor.device.kv_cache import KvCache

Pairs = Sequence[tuple[int, int]]
"""(source, target) block ids."""

_CHUNK_BYTES = 1 << 30


class HostStorage:
    """Host blocks of a rank: block after block, so that each is one copy.

    Copies are queued in the order of the calls. A block of the device lies in as many places as
    there are layers: it is gathered into a stage on the device, which is then copied at once.
    """

    def __init__(self, device: Device, cache: KvCache, num_blocks: int) -> None:
        """Raises DeviceMemoryError when the host has no room."""
        form = cache.form
        shape = form.data_shape(1)
        block = (shape[0], 2, *shape[3:])
        self._device = device
        self._cache = cache
        self._host = _HostBlocks(device, num_blocks, block, form.dtype)
        self._stage = device.empty(block, form.dtype)
        self._host_scales = self._stage_scales = None
        if form.scaled:
            self._host_scales = _HostBlocks(device, num_blocks, block[:-1], torch.float32)
            self._stage_scales = device.empty(block[:-1], torch.float32)
        self.num_blocks = num_blocks
        self.blocks_stored = 0
        self.blocks_loaded = 0

    def store(self, pairs: Pairs) -> None:
        """Queue copies of blocks of the device to host blocks."""
        for source, target in pairs:
            for data, host, stage in self._parts():
                self._device.run(_copying(stage, data[:, :, source]))
                self._device.download(stage, host[target])
        self.blocks_stored += len(pairs)

    def load(self, pairs: Pairs) -> None:
        """Queue copies of host blocks to blocks of the device."""
        for source, target in pairs:
            for data, host, stage in self._parts():
                self._device.upload(host[source], stage)
                self._device.run(_copying(data[:, :, target], stage))
        self.blocks_loaded += len(pairs)

    def _parts(self) -> Iterator[tuple[torch.Tensor, "_HostBlocks", torch.Tensor]]:
        yield self._cache.data, self._host, self._stage
        scales, stage = self._cache.scales, self._stage_scales
        if self._host_scales is not None and scales is not None and stage is not None:
            yield scales, self._host_scales, stage


class _HostBlocks:
    """Pinned memory of blocks, in chunks of up to a gibibyte: torch rounds the size of what it pins
    up to a power of two, which of all at once could be nearly twice as much."""

    def __init__(
        self, device: Device, num_blocks: int, shape: Sequence[int], dtype: torch.dtype
    ) -> None:
        block_bytes = prod(shape) * dtype.itemsize
        self._each = max(1, _CHUNK_BYTES // block_bytes)
        try:
            self._chunks = [
                device.pinned((min(self._each, num_blocks - first), *shape), dtype)
                for first in range(0, num_blocks, self._each)
            ]
        except DeviceMemoryError as error:
            raise DeviceMemoryError(
                f"swap_space: the host does not pin {num_blocks * block_bytes} bytes ({error}): a "
                f"smaller --swap-space takes less"
            ) from error

    def __getitem__(self, block: int) -> torch.Tensor:
        """Its memory."""
        chunk, place = divmod(block, self._each)
        return self._chunks[chunk][place]


def queue_copies(device: Device, cache: KvCache, pairs: Pairs) -> None:
    """Queue copies of blocks within the device's memory, one after another."""
    for part in (cache.data, cache.scales):
        if part is not None and pairs:
            device.run(_copying_blocks(part, tuple(pairs)))


def _copying(to: torch.Tensor, source: torch.Tensor) -> Work:
    def copy() -> None:
        to.copy_(source)

    return copy


def _copying_blocks(data: torch.Tensor, pairs: Pairs) -> Work:
    def copy() -> None:
        for source, target in pairs:
            data[:, :, target].copy_(data[:, :, source])

    return copy
