"""Who holds which blocks: taking them for a sequence, sharing, copying before a write, giving back.

The only user of the pool and the prefix cache. A table lists a sequence's blocks in token order:
token t lives in block table[t // block_size] at offset t % block_size.

A copy is due from when its target is taken until `finish_copies`: the source is held for as long,
so that nobody else gets it. Copies are made one after another, in the order in which they fell due:
a later one may have an earlier one's target as its source.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from triptych.engine_core.block_pool import BlockPool
from triptych.engine_core.ids import BlockId
from triptych.engine_core.prefix_cache import Hit, PrefixCache


class BlockTables:
    """Pool, cache and the copies that are due."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size: {block_size} is below 1")
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(block_size)
        self._copies: dict[BlockId, BlockId] = {}  # target -> source, in the order of falling due

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens need."""
        return -(-num_tokens // self.block_size)

    def copies(self) -> list[tuple[int, int]]:
        """The copies due, (source, target), in order."""
        return [(source, target) for target, source in self._copies.items()]

    # ------------------------------------------------------------------ taking

    def open(self, num_tokens: int, hit: Hit, spare_blocks: int) -> list[BlockId] | None:
        """A table for `num_tokens` tokens that begins with the hit's blocks.

        None, and nothing taken, where fewer than `spare_blocks` blocks would be left free. Order:
        the hit's blocks, then the source of its copy, then fresh blocks from the front of the free
        list, the first of which is the copy's target.
        """
        fresh = self.num_blocks_for(num_tokens) - len(hit.blocks)
        wanted = [*hit.blocks] if hit.source is None else [*hit.blocks, hit.source]
        taken = sum(self.pool.references(block) == 0 for block in wanted)
        if self.pool.num_free - taken - fresh < spare_blocks:
            return None
        for block in wanted:
            self.pool.retain(block)
        blocks = self._allocate(fresh)
        if hit.source is not None:
            self._copies[blocks[0]] = hit.source
        return [*hit.blocks, *blocks]

    def share(self, table: Sequence[BlockId]) -> list[BlockId]:
        """The same table for one holder more."""
        for block in table:
            self.pool.retain(block)
        return list(table)

    def prepare(self, table: list[BlockId], num_tokens: int, start: int, end: int) -> bool:
        """Make `table` long enough for `num_tokens` tokens, and its own where [start, end) goes.

        First fresh blocks at its end. Then, in order, a block that another table has too is
        replaced by a fresh one, with a copy if tokens before `start` are in it. False, and nothing
        changed, without blocks for all that.
        """
        size = self.block_size
        growth = max(0, self.num_blocks_for(num_tokens) - len(table))
        first, last = start // size, min(self.num_blocks_for(end), len(table))
        shared = [index for index in range(first, last) if self._holders(table[index]) > 1]
        if growth + len(shared) > self.pool.num_free:
            return False
        table += self._allocate(growth)
        for index in shared:
            old = table[index]
            (table[index],) = self._allocate(1)
            if start > index * size:
                self.pool.retain(old)
                self._copies[table[index]] = old
            self._release(old)
        return True

    def extend(self, table: list[BlockId], num_tokens: int) -> int:
        """Make `table` long enough for `num_tokens` tokens, or as long as free blocks last. Returns
        for how many of these tokens it has blocks."""
        growth = self.num_blocks_for(num_tokens) - len(table)
        table += self._allocate(max(0, min(growth, self.pool.num_free)))
        return min(num_tokens, len(table) * self.block_size)

    def _holders(self, block: BlockId) -> int:
        """How many tables have the block."""
        references = self.pool.references(block)
        if references == 1:
            return 1
        return references - sum(source == block for source in self._copies.values())

    def _allocate(self, count: int) -> list[BlockId]:
        blocks = self.pool.allocate(count)
        for block in blocks:
            self.cache.forget(block)
        return blocks

    # ------------------------------------------------------------------ giving back

    def keep_partial(
        self, table: Sequence[BlockId], num_computed: int, parent: bytes, token_ids: Sequence[int]
    ) -> None:
        """Register the last `token_ids`, computed and in a block that they do not fill, of a table
        that is about to be released; unless another holds the block, or its copy is still due."""
        block = table[num_computed // self.block_size]
        if self.pool.references(block) == 1 and block not in self._copies:
            self.cache.register_partial(block, parent, token_ids)

    def release(self, table: Sequence[BlockId]) -> None:
        """Give a table's blocks up, last block first.

        A free block that can be found goes to the end of the free list, so that the end of a text
        is forgotten before its beginning; another one to its front.
        """
        for block in reversed(table):
            self._release(block)

    def cut(self, table: list[BlockId], num_tokens: int) -> None:
        """Give up the blocks that `num_tokens` tokens do not need, last block first."""
        while len(table) > self.num_blocks_for(num_tokens):
            self._release(table.pop())

    def _release(self, block: BlockId) -> None:
        if self.pool.release(block, to_front=block not in self.cache):
            source = self._copies.pop(block, None)  # nobody has use for the copy
            if source is not None:
                self._release(source)

    def finish_copies(self) -> None:
        """The copies due were made: let go of their sources, in order."""
        sources = list(self._copies.values())
        self._copies.clear()
        for source in sources:
            self._release(source)

    def forget(self, table: Sequence[BlockId]) -> None:
        """None of the table's blocks can be found any more."""
        for block in table:
            self.cache.forget(block)

    # ------------------------------------------------------------------ checks

    def check(self, tables: Iterable[Sequence[BlockId]]) -> None:
        """Assert every invariant, given all tables. O(everything)."""
        self.pool.check()
        self.cache.check()
        held: Counter[BlockId] = Counter(self._copies.values())
        for table in tables:
            assert table, "tables: one is empty"
            assert len(set(table)) == len(table), "tables: one names a block twice"
            held.update(table)
        for block in map(BlockId, range(self.pool.num_blocks)):
            counted = self.pool.references(block)
            assert counted == held[block], f"tables: block {block} has {counted}, not {held[block]}"
        for target, source in self._copies.items():
            assert target != source, f"copies: {target} to itself"
            assert held[target] > 0, f"copies: nobody has {target}"
            assert target not in self.cache, f"copies: {target} can be found before it is filled"
