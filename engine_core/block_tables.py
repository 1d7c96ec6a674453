"""Who holds which blocks: taking them for a sequence, sharing, copying before a write, giving back.

The only user of the pool and the prefix cache. A table lists a sequence's blocks in token order:
token t lives in block table[t // block_size] at offset t % block_size.

A copy is due from when its target is taken until `finish_copies`: the source is held for as long,
so that nobody else gets it. Copies are made one after another, in the order in which they fell due:
a later one may have an earlier one's target as its source.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from triptych.engine_core.block_pool import BlockPool
from triptych.engine_core.host_blocks import HostBlocks
from triptych.engine_core.ids import BlockId
from triptych.engine_core.prefix_cache import CachedBlock, PrefixCache, whole_block
from triptych.engine_core.transfers import HostHit, Transfers


class Found(NamedTuple):
    """The cached beginning of a text: whole blocks, of the device in `blocks` and of host memory in
    `loads`, both in order; then `num_copied` tokens that are the first of block `source`; None and
    0 where there is no such block."""

    blocks: list[BlockId]
    source: BlockId | None
    num_copied: int
    loads: list[HostHit]

    @property
    def num_whole(self) -> int:
        """Whole blocks."""
        return len(self.blocks) + len(self.loads)

    def without_copy(self) -> "Found":
        """The whole blocks alone."""
        return Found(self.blocks, None, 0, self.loads)


NOTHING_FOUND = Found([], None, 0, [])


class BlockTables:
    """Pool, cache, the copies that are due, and what comes from and goes to host memory."""

    def __init__(
        self, num_blocks: int, block_size: int, num_host_blocks: int = 0, max_transfers: int = 0
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size: {block_size} is below 1")
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(block_size)
        self.transfers: Transfers | None = None
        if num_host_blocks > 0:
            self.transfers = Transfers(HostBlocks(num_host_blocks, block_size), max_transfers)
        self._copies: dict[BlockId, BlockId] = {}  # target -> source, in the order of falling due

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens need."""
        return -(-num_tokens // self.block_size)

    def copies(self) -> list[tuple[int, int]]:
        """The copies due, (source, target), in order."""
        return [(source, target) for target, source in self._copies.items()]

    # ------------------------------------------------------------------ taking

    def lookup(self, token_ids: Sequence[int], digests: Sequence[bytes]) -> Found:
        """As PrefixCache.lookup, but whole blocks that the device has not are looked for in host
        memory, as many as the next step has room to load."""
        hit = self.cache.lookup(token_ids, digests)
        if self.transfers is None:
            return Found(*hit, [])
        blocks, loads, most = [*hit.blocks], list[HostHit](), len(token_ids) - 1
        for index in range(len(blocks), most // self.block_size):
            text = whole_block(token_ids, digests, index, self.block_size)
            block, room = self.cache.find(text), self.transfers.num_loads_left - len(loads)
            kept = self.transfers.host.find(text) if block is None and room > 0 else None
            if block is not None:
                blocks.append(block)
            elif kept is not None:
                loads.append(HostHit(index, kept, text))
            else:
                break
        if not loads:
            return Found(*hit, [])
        num_whole = len(blocks) + len(loads)
        start = num_whole * self.block_size
        rest = tuple(token_ids[start : min(start + self.block_size, most)])
        return Found(blocks, *self.cache.best_child(digests[num_whole], rest), loads)

    def open(self, num_tokens: int, hit: Found, spare_blocks: int) -> list[BlockId] | None:
        """A table for `num_tokens` tokens that begins with what was found.

        None, and nothing taken, where fewer than `spare_blocks` blocks would be left free. Order:
        the device's blocks, the source of the copy and the host's blocks are held, then fresh
        blocks come from the front of the free list: first those to load to, then the copy's target.
        """
        fresh = self.num_blocks_for(num_tokens) - len(hit.blocks)
        wanted = [*hit.blocks] if hit.source is None else [*hit.blocks, hit.source]
        taken = sum(self.pool.references(block) == 0 for block in wanted)
        if self.pool.num_free - taken - fresh < spare_blocks:
            return None
        for block in wanted:
            self.pool.retain(block)
        if self.transfers is not None:
            for load in hit.loads:
                self.transfers.host.begin_load(load.block)
        table, blocks = [*hit.blocks], self._allocate(fresh)
        for load, block in zip(hit.loads, blocks, strict=False):
            self._load(load, block)
            table.insert(load.place, block)
        rest = blocks[len(hit.loads) :]
        if hit.source is not None:
            self._copies[rest[0]] = hit.source
        return table + rest

    def _load(self, load: HostHit, block: BlockId) -> None:
        """Into a fresh block; the host's is held."""
        assert self.transfers is not None, "there is host memory"
        self.transfers.load(load.block, block)
        parent, digest, tokens = load.text
        assert digest is not None, "whole blocks are loaded"
        self.cache.register(block, parent, digest, tokens)

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
        growth, shared = self._wanted(table, num_tokens, start, end)
        if growth + len(shared) > self.pool.num_free:
            return False
        table += self._allocate(growth)
        for index in shared:
            old = table[index]
            (table[index],) = self._allocate(1)
            if start > index * self.block_size:
                self.pool.retain(old)
                self._copies[table[index]] = old
            self._release(old)
        return True

    def num_wanted(self, table: list[BlockId], num_tokens: int, start: int, end: int) -> int:
        """Fresh blocks that `prepare` would take now."""
        growth, shared = self._wanted(table, num_tokens, start, end)
        return growth + len(shared)

    def _wanted(
        self, table: list[BlockId], num_tokens: int, start: int, end: int
    ) -> tuple[int, list[int]]:
        growth = max(0, self.num_blocks_for(num_tokens) - len(table))
        first, last = start // self.block_size, min(self.num_blocks_for(end), len(table))
        shared = [index for index in range(first, last) if self._holders(table[index]) > 1]
        return growth, shared

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
        if self.transfers is not None:
            self.transfers.store((block, self.cache.text(block)) for block in blocks)
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
        last = self.pool.references(block) == 1
        if last and self.transfers is not None and self.transfers.cancel(block):
            self.cache.forget(block)
        if self.pool.release(block, to_front=block not in self.cache):
            source = self._copies.pop(block, None)  # nobody has use for the copy
            if source is not None:
                self._release(source)

    def awaits(self, table: Sequence[BlockId]) -> bool:
        """Whether a copy or a load into one of the table's blocks is due."""
        copied = bool(self._copies) and not self._copies.keys().isdisjoint(table)
        return copied or (self.transfers is not None and self.transfers.awaits(table))

    def finish_copies(self, copies: Iterable[tuple[int, int]]) -> None:
        """These copies, (source, target), were made: let go of their sources, in order."""
        made = [self._copies.pop(BlockId(target)) for _, target in copies]
        for source in made:
            self._release(source)

    def forget(self, table: Sequence[BlockId], texts: Iterable[CachedBlock]) -> None:
        """None of the table's blocks can be found any more, nor its whole blocks' texts in host
        memory."""
        for block in table:
            self.cache.forget(block)
        if self.transfers is not None:
            for text in texts:
                self.transfers.forget(text)

    def forget_all(self) -> None:
        """No block can be found any more."""
        self.cache.clear()
        if self.transfers is not None:
            self.transfers.clear()

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
        if self.transfers is not None:
            self.transfers.check(self.pool.references)
