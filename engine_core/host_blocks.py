"""Which blocks of host memory hold which text: what the device has no room for is kept there.

One mechanism for swapping and for a larger prefix cache: whoever gives up blocks only lets go of
them; a whole block that could be found goes to host memory when the device's is taken for something
else, and comes back when its text is wanted. Knows no device blocks (block_tables.py).

A host block is empty, or being stored to, or kept: then it can be found. While it is being stored
to, or loaded from, it is held in the pool; else it is free there: empty ones in front, then the
kept ones, least recently used first. So a new text takes an empty one, or the oldest text's.
"""

from collections.abc import Mapping

from triptych.engine_core.block_pool import BlockPool
from triptych.engine_core.ids import BlockId
from triptych.engine_core.prefix_cache import CachedBlock, PrefixCache


class HostBlocks:
    """A pool and a cache of whole blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._pool = BlockPool(num_blocks)
        self._cache = PrefixCache(block_size)

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return self._pool.num_blocks

    @property
    def num_used(self) -> int:
        """Blocks whose text can be found."""
        return len(self._cache)

    def find(self, text: CachedBlock) -> BlockId | None:
        """The block that holds this text."""
        return self._cache.find(text)

    # ------------------------------------------------------------------ stores

    def keeps(self, text: CachedBlock) -> bool:
        """Whether the text is kept already; then it counts as used just now."""
        block = self.find(text)
        if block is None:
            return False
        if self._pool.references(block) == 0:
            self._pool.retain(block)
            self._pool.release(block)
        return True

    def begin_store(self) -> BlockId | None:
        """A block to store a text to; None where every block is in use."""
        if self._pool.num_free == 0:
            return None
        (block,) = self._pool.allocate(1)
        self._cache.forget(block)
        return block

    def end_store(self, block: BlockId, text: CachedBlock | None) -> None:
        """The store was made, and the text can be found, unless another block has it; None: it was
        not made, or nobody wants the text."""
        if text is not None and text.digest is not None:
            self._cache.register(block, text.parent, text.digest, text.token_ids)
        self._give_back(block)

    # ------------------------------------------------------------------ loads

    def begin_load(self, block: BlockId) -> None:
        """Its text is to be loaded: it is kept until then."""
        self._pool.retain(block)

    def end_load(self, block: BlockId) -> None:
        """The load was made, or nobody wants it."""
        self._give_back(block)

    def _give_back(self, block: BlockId) -> None:
        self._pool.release(block, to_front=block not in self._cache)

    # ------------------------------------------------------------------ forgetting

    def forget(self, text: CachedBlock) -> None:
        """The text cannot be found any more."""
        block = self.find(text)
        if block is not None:
            self._forget(block)

    def clear(self) -> None:
        """No text can be found any more, the last block's first."""
        for block in reversed(range(self.num_blocks)):
            if BlockId(block) in self._cache:
                self._forget(BlockId(block))

    def _forget(self, block: BlockId) -> None:
        self._cache.forget(block)
        if self._pool.references(block) == 0:
            self._pool.retain(block)
            self._give_back(block)

    def check(self, holders: Mapping[BlockId, int]) -> None:
        """Assert every invariant, given by how many stores and loads each block is held."""
        self._pool.check()
        self._cache.check()
        free = self._pool.free_blocks()
        kept = [block in self._cache for block in free]
        assert kept == sorted(kept), "host: empty blocks are in front"
        for block in map(BlockId, range(self.num_blocks)):
            counted, held = self._pool.references(block), holders.get(block, 0)
            assert counted == held, f"host: block {block} has {counted} holders, not {held}"
