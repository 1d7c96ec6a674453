"""The blocks of the KV cache as numbers: who is free, who is held, and by how many.

Knows nothing of sequences or tokens (kv_cache.py), nor of the memory behind a block (the executor).
`kernels/core` has the same class in C++.
"""

from triptych.engine_core.ids import BlockId


class OutOfBlocks(Exception):
    """Fewer blocks are free than were asked for. Nothing was taken."""


class BlockPool:
    """Reference-counted blocks 0..num_blocks-1; every operation on one block is O(1).

    Free blocks form a doubly linked list through two arrays, in eviction order: taken from the
    front, given back at the end, so the block that was free longest goes first. (A prefix cache
    can later unlink a free block from the middle without a search.)
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
        """One holder more for a held block."""
        self._assert_held(block)
        self._references[block] += 1

    def release(self, block: BlockId) -> None:
        """One holder less; with the last one the block is free."""
        self._assert_held(block)
        self._references[block] -= 1
        if self._references[block] == 0:
            self._link_last(block)
            self.num_free += 1

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

    def _assert_held(self, block: BlockId) -> None:
        held = 0 <= block < self.num_blocks and self._references[block] > 0
        assert held, f"pool: block {block} is not held"

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before

    def _link_last(self, block: int) -> None:
        end = self.num_blocks
        last = self._previous[end]
        self._next[last] = self._previous[end] = block
        self._previous[block], self._next[block] = last, end
