"""The blocks of the KV cache as numbers: who is free, who is held, and by how many.

Knows nothing of sequences or tokens (block_tables.py), nor of the memory behind a block (the
executor).
"""

from triptych.engine_core.ids import BlockId


class OutOfBlocks(Exception):
    """Fewer blocks are free than were asked for. Nothing was taken."""


class BlockPool:
    """Reference-counted blocks 0..num_blocks-1; every operation on one block is O(1).

    Free blocks form a doubly linked list through two arrays, in the order in which they are taken:
    from the front. A block whose content may be wanted again is given back at the end, so that the
    one that was free longest goes first; one that is worth nothing, at the front. A free block that
    is wanted again is taken out of the middle without a search (vLLM's FreeKVCacheBlockQueue).
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks: {num_blocks} is below 1")
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._references = [0] * num_blocks
        # Entry num_blocks is the list's ends: its next is the front, its previous the back.
        self._next = [*range(1, num_blocks + 1), 0]
        self._previous = [num_blocks, *range(num_blocks)]

    def allocate(self, count: int) -> list[BlockId]:
        """Take `count` blocks, each held once, or raise OutOfBlocks and take none."""
        assert count >= 0, f"count: {count} is below 0"
        if count > self.num_free:
            raise OutOfBlocks(
                f"{count} blocks asked for, {self.num_free} of {self.num_blocks} free"
            )
        blocks = []
        for _ in range(count):
            block = self._next[self.num_blocks]
            self._unlink(block)
            self._references[block] = 1
            blocks.append(BlockId(block))
        self.num_free -= count
        return blocks

    def retain(self, block: BlockId) -> None:
        """One holder more, for a held block or a free one, which is then no longer free."""
        assert 0 <= block < self.num_blocks, f"pool: there is no block {block}"
        if self._references[block] == 0:
            self._unlink(block)
            self.num_free -= 1
        self._references[block] += 1

    def release(self, block: BlockId, *, to_front: bool = False) -> bool:
        """One holder less; with the last one the block is free, at the end of the free list or at
        its front. Whether it is free now."""
        held = 0 <= block < self.num_blocks and self._references[block] > 0
        assert held, f"pool: block {block} is not held"
        self._references[block] -= 1
        if self._references[block] > 0:
            return False
        end = self.num_blocks
        if to_front:
            self._link(block, end, self._next[end])
        else:
            self._link(block, self._previous[end], end)
        self.num_free += 1
        return True

    def references(self, block: BlockId) -> int:
        """How many hold the block; 0 when it is free."""
        return self._references[block]

    def free_blocks(self) -> list[BlockId]:
        """The free blocks in the order in which they will be taken. O(num_blocks)."""
        blocks: list[BlockId] = []
        block = self._next[self.num_blocks]
        while block != self.num_blocks and len(blocks) <= self.num_blocks:
            blocks.append(BlockId(block))
            block = self._next[block]
        return blocks

    def check(self) -> None:
        """Assert that the free list holds exactly the blocks that nobody holds. O(num_blocks)."""
        free = self.free_blocks()
        unheld = [block for block, count in enumerate(self._references) if count == 0]
        assert min(self._references) >= 0, "pool: a reference count is negative"
        assert sorted(free) == unheld, "pool: the free list is not the set of unheld blocks"
        assert len(free) == self.num_free, "pool: num_free is not the length of the free list"
        links = [self.num_blocks, *free, self.num_blocks]
        backwards = [self._previous[block] for block in links[1:]]
        assert backwards == links[:-1], "pool: the free list differs when read backwards"

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before

    def _link(self, block: int, before: int, after: int) -> None:
        self._next[before] = self._previous[after] = block
        self._previous[block], self._next[block] = before, after
