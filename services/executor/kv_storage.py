"""The memory behind block ids: keys and values of every layer, in blocks of tokens."""

import mmap
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from triptych.services.executor.model_config import ModelConfig
from triptych.services.runtime.lifecycle import StartupError

DEFAULT_UTILIZATION = 0.5
DEFAULT_CAP_BYTES = 1 << 30
"""Without a setting the cache takes at most this: an embedded engine leaves room for its host."""
DEFAULT_CAP_SEQUENCES = 64
"""Without a byte setting, room for more full-length sequences than this is never reserved."""


@dataclass(frozen=True, slots=True)
class KvBudget:
    """How much the cache may take: exact bytes win; else a share of the available memory."""

    memory_bytes: int | None = None
    memory_utilization: float | None = None


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: keys and values of `block_size` tokens in all layers."""
    return 2 * config.num_layers * block_size * config.kv_size * dtype.itemsize


def num_blocks_for(
    config: ModelConfig,
    block_size: int,
    dtype: torch.dtype,
    max_model_len: int,
    budget: KvBudget,
) -> int:
    """Blocks that the budget pays for. Raises StartupError when that is less than one.

    `memory_bytes` is taken as given. Otherwise: `memory_utilization` (default 0.5) of the available
    memory, never more than 64 sequences of full length need; when neither is set, at most 1 GiB.
    """
    size = block_bytes(config, block_size, dtype)
    if budget.memory_bytes is not None:
        num_blocks, what = budget.memory_bytes // size, f"kv_cache_memory {budget.memory_bytes}"
    else:
        share = budget.memory_utilization
        room = int(available_memory() * (DEFAULT_UTILIZATION if share is None else share))
        if share is None:
            room = min(room, DEFAULT_CAP_BYTES)
        most = DEFAULT_CAP_SEQUENCES * -(-max_model_len // block_size)
        num_blocks, what = min(room // size, most), f"a KV cache of {room} bytes"
    if num_blocks < 1:
        raise StartupError(
            f"{what} is less than one block of {block_size} tokens, which takes {size} bytes; "
            f"use a larger --kv-cache-memory or a smaller --block-size"
        )
    return int(num_blocks)


def available_memory() -> int:
    """Bytes that can be taken without swapping: of the machine, or of its container if less."""
    available = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):  # no cgroup v2 here
        return available
    return available if limit == "max" else max(0, min(available, int(limit) - used))


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

    def store(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k and v [T, kv_heads, head_dim] to slots int64 [T] of a layer."""
        keys, values = self._slots[layer]
        keys.index_copy_(0, slots, k)
        values.index_copy_(0, slots, v)
