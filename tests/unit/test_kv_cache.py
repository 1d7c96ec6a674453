import pytest

from triptych.engine_core.block_pool import BlockPool
from triptych.engine_core.ids import BlockId, SequenceId
from triptych.engine_core.kv_cache import KvCache
from triptych.engine_core.step import ScheduledSequence

ONE, TWO = SequenceId(1), SequenceId(2)


def test_a_table_grows_by_whole_blocks() -> None:
    cache = KvCache(BlockPool(4), 3)
    assert cache.reserve(ONE, 3)
    assert cache.table(ONE) == [0]
    assert cache.reserve(ONE, 4)
    assert cache.reserve(ONE, 6)
    assert cache.table(ONE) == [0, 1]
    assert cache.reserve(ONE, 1)
    assert cache.table(ONE) == [0, 1]
    assert (cache.num_blocks, cache.block_size, cache.num_free_blocks) == (4, 3, 2)


def test_without_room_nothing_is_taken() -> None:
    cache = KvCache(BlockPool(3), 2)
    assert cache.reserve(ONE, 4)
    assert not cache.reserve(TWO, 3)
    assert cache.sequence_ids() == [1]
    assert not cache.reserve(ONE, 7)
    assert cache.table(ONE) == [0, 1]
    cache.check()


def test_release_gives_the_last_block_back_first() -> None:
    pool = BlockPool(3)
    cache = KvCache(pool, 1)
    cache.reserve(ONE, 3)
    cache.release(ONE)
    assert pool.free_blocks() == [2, 1, 0]
    assert cache.table(ONE) == []
    cache.release(ONE)
    cache.check()


def test_rows_get_blocks_until_room_lacks() -> None:
    cache = KvCache(BlockPool(3), 2)
    rows = [ScheduledSequence(ONE, 1, 3, True), ScheduledSequence(TWO, 0, 4, True)]
    assert cache.reserve_rows(rows) == 1
    assert cache.reserve_rows(rows[:1]) == 1
    assert cache.table(ONE) == [0, 1]
    assert cache.table(TWO) == []


def test_a_shared_block_is_counted_by_the_pool() -> None:
    pool = BlockPool(2)
    cache = KvCache(pool, 1)
    cache.reserve(ONE, 1)
    pool.retain(BlockId(0))
    with pytest.raises(AssertionError, match="block 0 is miscounted"):
        cache.check()
    cache.release(ONE)
    assert pool.num_free == 1


def test_block_size_is_checked() -> None:
    with pytest.raises(ValueError, match="block_size: 0 is below 1"):
        KvCache(BlockPool(1), 0)
