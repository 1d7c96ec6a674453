import pytest

from triptych.engine_core.block_pool import BlockPool, OutOfBlocks
from triptych.engine_core.ids import BlockId


def test_blocks_come_in_order_and_go_back_to_the_end() -> None:
    pool = BlockPool(4)
    assert pool.allocate(2) == [0, 1]
    pool.release(BlockId(0))
    assert pool.free_blocks() == [2, 3, 0]
    assert pool.allocate(3) == [2, 3, 0]
    assert pool.num_free == 0
    pool.check()


def test_out_of_blocks_takes_nothing() -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    with pytest.raises(OutOfBlocks, match="2 blocks asked for, 1 of 3 free"):
        pool.allocate(2)
    assert pool.free_blocks() == [2]
    assert pool.allocate(0) == []


def test_a_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.retain(block)
    pool.release(block)
    assert (pool.num_free, pool.references(block)) == (0, 1)
    pool.release(block)
    assert (pool.num_free, pool.references(block)) == (1, 0)
    pool.check()


def test_a_worthless_block_goes_to_the_front() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    assert [pool.release(block, to_front=True) for block in blocks] == [True, True, True]
    assert pool.free_blocks() == [2, 1, 0, 3]
    pool.check()


def test_a_free_block_is_taken_out_of_the_middle() -> None:
    pool = BlockPool(4)
    pool.retain(BlockId(2))
    assert (pool.free_blocks(), pool.num_free, pool.references(BlockId(2))) == ([0, 1, 3], 3, 1)
    pool.check()
    pool.retain(BlockId(2))
    assert not pool.release(BlockId(2))
    assert pool.release(BlockId(2))
    assert pool.free_blocks() == [0, 1, 3, 2]


@pytest.mark.parametrize("block", [0, 1, -1])
def test_only_a_held_block_can_be_released(block: int) -> None:
    with pytest.raises(AssertionError, match="is not held"):
        BlockPool(1).release(BlockId(block))


@pytest.mark.parametrize("block", [1, -1])
def test_only_a_block_of_the_pool_can_be_retained(block: int) -> None:
    with pytest.raises(AssertionError, match="there is no block"):
        BlockPool(1).retain(BlockId(block))


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks: 0 is below 1"):
        BlockPool(0)
    with pytest.raises(AssertionError, match="count: -1"):
        BlockPool(1).allocate(-1)


def test_check_notices_a_lost_block() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    pool._references[0] = 0
    with pytest.raises(AssertionError, match="free list is not the set of unheld blocks"):
        pool.check()
