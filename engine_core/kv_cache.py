"""Block tables: which blocks of the KV cache hold the tokens of which sequence.
The table of a sequence lists its blocks in token order: token t lives in block
table[t // block_size] at offset t % block_size. `kernels/core` has KvCache in C++ as well.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from triptych.engine_core.block_pool import BlockPool
from triptych.engine_core.ids import BlockId, SequenceId
from triptych.engine_core.step import ScheduledSequence


class KvBlocks(Protocol):
    """What the scheduler needs of a KV cache. All counts are of blocks, but for num_tokens."""

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        ...

    def reserve(self, sequence_id: SequenceId, num_tokens: int) -> bool:
        """Extend the table to hold `num_tokens` tokens; False, and nothing taken, without room."""
        ...

    def reserve_rows(self, rows: Sequence[ScheduledSequence]) -> int:
        """Reserve, row by row, the tokens up to the row's end; stop at the first without room.

        Returns how many rows got their blocks. They keep them: asking again takes nothing more.
        """
        ...

    def release(self, sequence_id: SequenceId) -> None:
        """Give up the sequence's blocks, if it has any."""
        ...

    def table(self, sequence_id: SequenceId) -> Sequence[int]:
        """The sequence's blocks in token order; empty if it has none."""
        ...

    def sequence_ids(self) -> list[int]:
        """The sequences that hold blocks, ascending."""
        ...

    def check(self) -> None:
        """Assert that the pool's reference counts are those of the tables. O(num_blocks)."""
        ...


class KvCache:
    """The block table of every sequence that holds blocks; the only user of the pool."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size: {block_size} is below 1")
        self._pool = pool
        self._block_size = block_size
        self._tables: dict[SequenceId, list[BlockId]] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return self._pool.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self._block_size

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return self._pool.num_free

    def reserve(self, sequence_id: SequenceId, num_tokens: int) -> bool:
        """Extend the table to hold `num_tokens` tokens; False, and nothing taken, without room."""
        table = self._tables.get(sequence_id, [])
        missing = -(-num_tokens // self._block_size) - len(table)
        if missing > self._pool.num_free:
            return False
        if missing > 0:
            table += self._pool.allocate(missing)
            self._tables[sequence_id] = table
        return True

    def reserve_rows(self, rows: Sequence[ScheduledSequence]) -> int:
        """Reserve the rows' tokens, as far as there is room; how many rows got theirs."""
        for index, row in enumerate(rows):
            if not self.reserve(row.sequence_id, row.start + row.num_tokens):
                return index
        return len(rows)

    def release(self, sequence_id: SequenceId) -> None:
        """Give up the sequence's blocks, if it has any."""
        # Last block first: the end of a text is the least likely part to be wanted again.
        for block in reversed(self._tables.pop(sequence_id, [])):
            self._pool.release(block)

    def table(self, sequence_id: SequenceId) -> list[BlockId]:
        """The sequence's blocks in token order; empty if it has none."""
        return list(self._tables.get(sequence_id, ()))

    def sequence_ids(self) -> list[int]:
        """The sequences that hold blocks, ascending."""
        return sorted(self._tables)

    def check(self) -> None:
        """Assert that the pool's reference counts are those of the tables. O(num_blocks)."""
        self._pool.check()
        held = Counter(block for table in self._tables.values() for block in table)
        for table in self._tables.values():
            assert table, "kv_cache: a table is empty"
            assert len(set(table)) == len(table), "kv_cache: a table names a block twice"
        for block in range(self._pool.num_blocks):
            counted = self._pool.references(BlockId(block))
            assert counted == held[BlockId(block)], f"kv_cache: block {block} is miscounted"
