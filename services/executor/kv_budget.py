"""How many blocks of keys and values a machine has room for. Knows nothing of tensors."""

from dataclasses import dataclass
from pathlib import Path

import psutil

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


def num_blocks_for(block_bytes: int, block_size: int, max_model_len: int, budget: KvBudget) -> int:
    """Blocks that the budget pays for. Raises StartupError when that is less than one.

    `block_bytes`: of `block_size` tokens in all layers. `memory_bytes` is taken as given.
    Otherwise: `memory_utilization` (default 0.5) of the available memory, never more than 64
    sequences of full length need; when neither is set, at most 1 GiB.
    """
    if budget.memory_bytes is not None:
        num_blocks = budget.memory_bytes // block_bytes
        what = f"kv_cache_memory {budget.memory_bytes}"
    else:
        share = budget.memory_utilization
        room = int(available_memory() * (DEFAULT_UTILIZATION if share is None else share))
        if share is None:
            room = min(room, DEFAULT_CAP_BYTES)
        most = DEFAULT_CAP_SEQUENCES * -(-max_model_len // block_size)
        num_blocks, what = min(room // block_bytes, most), f"a KV cache of {room} bytes"
    if num_blocks < 1:
        raise StartupError(
            f"{what} is less than one block of {block_size} tokens, which takes {block_bytes} "
            f"bytes; use a larger --kv-cache-memory or a smaller --block-size"
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
