"""The memory behind block ids: keys and values of every layer, in blocks of tokens."""

import mmap
from collections.abc import Sequence

import torch

from triptych.services.executor.model_config import ModelConfig
from triptych.services.runtime.lifecycle import StartupError


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: keys and values of `block_size` tokens in all layers."""
    return 2 * config.num_layers * block_size * config.kv_size * dtype.itemsize


class KvStorage:
    """Keys and values, [layers, 2, num_blocks, block_size, kv_heads, head_dim] of one dtype.

    Pages are taken from the machine as blocks are first written. One thread only.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> None:
        shape = (
            config.num_layers, 2, num_blocks, block_size, config.num_kv_heads, config.head_dim,
        )  # fmt: skip
        try:
            # An anonymous map is zero pages that the system hands out as they are written, so an
            # unused block costs nothing; torch.zeros would touch every page.
            memory = mmap.mmap(-1, block_bytes(config, block_size, dtype) * num_blocks)
            self._data = torch.frombuffer(memory, dtype=dtype).view(shape)
        except (OSError, RuntimeError) as error:
            raise StartupError(
                f"the KV cache of {num_blocks * block_bytes(config, block_size, dtype)} bytes "
                f"cannot be allocated; use a smaller --kv-cache-memory"
            ) from error
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._blocks = [(layer[0], layer[1]) for layer in self._data]
        self._slots = [(keys.flatten(0, 1), values.flatten(0, 1)) for keys, values in self._blocks]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole cache."""
        return self._data.nbytes

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, each [num_blocks, block_size, kv_heads, head_dim]; views."""
        return self._blocks[index]

    def clear(self, blocks: torch.Tensor) -> None:
        """Zero blocks (ids, int64) before a sequence first writes to them.

        Attention multiplies what lies behind a sequence's last token by zero; NaN of the block's
        former owner would survive that.
        """
        self._data.index_fill_(2, blocks, 0)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks, one after another, in all layers."""
        for source, target in zip(sources, targets, strict=True):
            self._data[:, :, target] = self._data[:, :, source]

    def store(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k and v [T, kv_heads, head_dim] to slots int64 [T] of a layer."""
        keys, values = self._slots[layer]
        keys.index_copy_(0, slots, k)
        values.index_copy_(0, slots, v)
