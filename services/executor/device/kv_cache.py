"""The memory behind block ids on a device: keys and values of every layer, in blocks of tokens."""

from dataclasses import dataclass

import torch

from triptych.services.executor.device.device import Device
from triptych.services.executor.device.network import NetworkForm
from triptych.services.executor.device.ops import KvLayer

SCALED = (torch.int8, torch.float8_e4m3fn)
"""Types of caches that have a float32 scale for each token and head."""


@dataclass(frozen=True, slots=True)
class KvForm:
    """What a block of a rank holds."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(
        cls, form: NetworkForm, num_layers: int, block_size: int, dtype: torch.dtype
    ) -> "KvForm":
        """Of a rank's network."""
        return cls(num_layers, block_size, form.num_kv_heads, form.head_dim, dtype)

    @property
    def scaled(self) -> bool:
        """Whether there are scales."""
        return self.dtype in SCALED

    @property
    def block_bytes(self) -> int:
        """Bytes of a block: keys, values and scales in all layers."""
        rows = 2 * self.num_layers * self.block_size * self.num_kv_heads
        return rows * (self.head_dim * self.dtype.itemsize + (4 if self.scaled else 0))

    def data_shape(self, num_blocks: int) -> tuple[int, ...]:
        """[layers, 2, blocks, block_size, heads, head_dim]."""
        return (
            self.num_layers, 2, num_blocks, self.block_size, self.num_kv_heads, self.head_dim,
        )  # fmt: skip


class KvCache:
    """Keys and values, [layers, 2, blocks, block_size, heads, head_dim], and their scales."""

    def __init__(self, device: Device, form: KvForm, num_blocks: int) -> None:
        """Raises DeviceMemoryError."""
        shape = form.data_shape(num_blocks)
        # Anything may be in there: what lies behind a sequence's last token is never looked at.
        self.data = device.empty(shape, form.dtype)
        self.scales = device.empty(shape[:-1], torch.float32) if form.scaled else None
        self.form = form
        self.num_blocks = num_blocks

    @property
    def num_bytes(self) -> int:
        """Bytes of all."""
        return self.num_blocks * self.form.block_bytes

    @property
    def layers(self) -> tuple[KvLayer, ...]:
        """Each layer's part."""
        out = []
        for index in range(self.form.num_layers):
            keys, values = self.data[index, 0], self.data[index, 1]
            scales = self.scales
            out.append(
                KvLayer(
                    keys,
                    values,
                    None if scales is None else (scales[index, 0], scales[index, 1]),
                )
            )
        return tuple(out)
