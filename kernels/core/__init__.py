"""C++ twins of engine_core's hot paths: block pool, block tables, step writer.

They mean what the plain ones in engine_core mean, call by call and byte by byte (a property test
drives both in lockstep). Neither imports the other: they meet in engine_core's Protocols.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from triptych.kernels.core._core import BlockPool, KvCache, OutOfBlocks, StepWriter

__all__ = ["BlockPool", "KvCache", "NativeTwins", "OutOfBlocks", "StepWriter", "native_twins"]


class SlotLayout(Protocol):
    """What the writer needs of engine_core.layout.StepLayout."""

    @property
    def max_tokens(self) -> int:
        """Tokens of a step, at most."""
        ...

    @property
    def max_rows(self) -> int:
        """Rows of a step, at most."""
        ...

    @property
    def max_blocks_per_row(self) -> int:
        """Blocks of a sequence, at most."""
        ...

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        ...

    @property
    def arrays(self) -> Mapping[str, tuple[int, tuple[int, ...]]]:
        """Name -> (byte offset within the slot, shape) of each int32 array."""
        ...


@dataclass(frozen=True, slots=True)
class NativeTwins:
    """The C++ pair; fits engine_core.twins.Twins."""

    kv_cache: KvCache
    step_writer: StepWriter


def native_twins(num_blocks: int, block_size: int, layout: SlotLayout) -> NativeTwins:
    """The C++ pair, over a pool of its own."""
    kv_cache = KvCache(BlockPool(num_blocks), block_size)
    writer = StepWriter(
        kv_cache,
        max_tokens=layout.max_tokens,
        max_rows=layout.max_rows,
        max_blocks_per_row=layout.max_blocks_per_row,
        slot_bytes=layout.slot_bytes,
        offsets={name: offset for name, (offset, _) in layout.arrays.items()},
    )
    return NativeTwins(kv_cache, writer)
