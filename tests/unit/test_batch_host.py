"""Host memory for blocks, call by call, for both twins."""

import pytest

from batch_calls import build, close, match, open_text, plan_all, step, text
from batch_model import BatchFactory, BatchShape
from batch_twins import TWINS
from triptych.engine_core.batch import NOT_FINITE, Batch
from triptych.engine_core.ids import SequenceId
from triptych.engine_core.layout import DEVICE_HEADER, DEVICE_HEADER_OFFSET

SHAPE = BatchShape(num_blocks=4, block_size=4, max_len=40, num_host_blocks=3, max_transfers=2)
ONE, TWO, THREE = text(8), text(8, 20), text(16, 40)


@pytest.fixture(params=TWINS, ids=["python", "native"])
def factory(request: pytest.FixtureRequest) -> BatchFactory:
    made: BatchFactory = request.param
    return made


@pytest.fixture
def batch(factory: BatchFactory) -> Batch:
    return build(factory, SHAPE)


def new_slot(shape: BatchShape = SHAPE) -> memoryview:
    return memoryview(bytearray(shape.layout.slot_bytes))


def compute(batch: Batch, number: int, tokens: list[int], shape: BatchShape = SHAPE) -> int:
    """Compute a text and leave it; how much of it was found."""
    found = open_text(batch, number, tokens)
    step(batch, shape=shape)
    close(batch, number)
    return found


def pairs(slot: memoryview, kind: str, count: int, shape: BatchShape = SHAPE) -> list[object]:
    columns = []
    for end in ("sources", "targets"):
        offset, _ = shape.layout.arrays[f"{kind}_{end}"]
        columns.append(slot[offset : offset + 4 * count].cast("i").tolist())
    return list(zip(*columns, strict=True))


def test_what_is_taken_is_stored_first_and_found_when_that_is_over(batch: Batch) -> None:
    compute(batch, 1, ONE)  # blocks 0 and 1
    open_text(batch, 2, THREE)
    stored = batch.stores()
    assert [target for _, target in stored] == [0, 1]
    assert sorted(source for source, _ in stored) == [0, 1]
    assert match(batch, [*ONE, 9]) == (0, 0), "not yet"
    plan_all(batch)
    slot = new_slot()
    batch.write(slot, 1)
    assert DEVICE_HEADER.unpack_from(slot, DEVICE_HEADER_OFFSET)[:2] == (2, 0)
    assert pairs(slot, "store", 2) == stored
    assert batch.stores() == []
    batch.check()
    batch.apply([5])
    batch.check()
    assert batch.num_host_blocks_used == 2
    assert match(batch, [*ONE, 9]) == (8, 0)


def test_a_hit_in_host_memory_is_loaded_to_fresh_blocks(batch: Batch) -> None:
    compute(batch, 1, ONE)
    compute(batch, 2, THREE)
    assert open_text(batch, 3, [*ONE, 9]) == 8
    table = batch.table(SequenceId(3))
    loads = batch.loads()
    assert [target for _, target in loads] == table[:2]
    assert batch.host_hits_total == 8
    batch.check()
    assert open_text(batch, 4, [*ONE[:4], 7]) == 4, "what is to be loaded is shared"
    assert batch.table(SequenceId(4))[0] == table[0]
    assert batch.loads() == loads
    plan_all(batch)
    slot = new_slot()
    batch.write(slot, 2)
    num_stores, num_loads, *_ = DEVICE_HEADER.unpack_from(slot, DEVICE_HEADER_OFFSET)
    assert (num_stores, num_loads) == (1, 2), "room for one more text"
    assert pairs(slot, "load", 2) == loads
    batch.apply([1, 2])
    batch.check()
    assert batch.num_host_blocks_used == 3
    close(batch, 3, 4)
    assert batch.num_free_blocks == 4


def test_a_text_that_is_kept_is_not_stored_again(batch: Batch) -> None:
    compute(batch, 1, ONE)
    compute(batch, 2, THREE)
    compute(batch, 3, [*ONE, 9])  # back on the device, and kept as it was
    open_text(batch, 4, text(16, 70))  # takes all
    kept = batch.num_host_blocks_used
    assert len(batch.stores()) == 1, "of THREE: the others of its blocks went before, ONE is there"
    step(batch, shape=SHAPE)
    close(batch, 4)
    assert batch.num_host_blocks_used == kept + 1
    assert match(batch, [*ONE, 9]) == (8, 0)


def test_a_load_that_nobody_wants_any_more_is_not_made(batch: Batch) -> None:
    compute(batch, 1, ONE)
    compute(batch, 2, THREE)
    open_text(batch, 3, [*ONE, 9])
    close(batch, 3)
    assert batch.loads() == []
    assert batch.num_free_blocks == 4
    assert match(batch, [*ONE, 9]) == (8, 0), "it is in host memory as before"


def test_after_a_step_that_failed_loads_are_due_and_its_stores_forgotten(batch: Batch) -> None:
    compute(batch, 1, ONE)
    compute(batch, 2, THREE)
    open_text(batch, 3, [*ONE, 9])
    due = batch.loads()
    assert batch.stores()
    plan_all(batch)
    batch.write(new_slot(), 3)
    assert batch.loads() == []
    batch.abandon()
    batch.check()
    assert batch.loads() == due
    assert batch.stores() == []
    assert batch.num_host_blocks_used == 2
    step(batch, 5, shape=SHAPE)
    assert batch.loads() == []
    close(batch, 3)


def test_the_least_recently_used_text_makes_room(batch: Batch) -> None:
    compute(batch, 1, ONE)
    compute(batch, 2, THREE)  # host: both blocks of ONE
    assert compute(batch, 3, [*ONE[:4], 9]) == 4  # uses the first
    compute(batch, 4, text(16, 70))  # stores two of what is left of THREE
    assert batch.num_host_blocks_used == 3
    assert match(batch, [*ONE, 9]) == (4, 0), "the second was used longest ago"


def test_more_than_a_step_has_room_for_is_dropped_and_computed_anew(factory: BatchFactory) -> None:
    shape = BatchShape(num_blocks=4, block_size=4, max_len=40, num_host_blocks=9, max_transfers=1)
    batch = build(factory, shape)
    compute(batch, 1, ONE, shape)
    compute(batch, 2, THREE, shape)  # takes both blocks of ONE
    assert batch.num_host_blocks_used == 1
    assert match(batch, [*ONE, 9]) == (4, 0), "its beginning, which is worth most"
    batch.check()


def test_nan_is_not_found_in_host_memory(batch: Batch) -> None:
    compute(batch, 1, ONE)
    compute(batch, 2, THREE)
    open_text(batch, 3, [*ONE, 9])
    plan_all(batch)
    batch.write(new_slot(), 3)
    batch.apply([NOT_FINITE])
    batch.check()
    assert match(batch, [*ONE, 9]) == (0, 0)


def test_forget_cache_forgets_host_memory(batch: Batch) -> None:
    compute(batch, 1, ONE)
    compute(batch, 2, THREE)
    open_text(batch, 3, [*ONE, 9])
    batch.forget_cache()
    batch.check()
    assert batch.num_host_blocks_used == 0
    assert len(batch.loads()) == 2, "what runs goes on"
    assert match(batch, [*ONE, 9]) == (0, 0)
    step(batch, shape=SHAPE)
    assert batch.num_computed(SequenceId(3)) == 9
    close(batch, 3)


def test_without_host_memory_nothing_is_stored(factory: BatchFactory) -> None:
    shape = BatchShape(num_blocks=4, block_size=4, max_len=40, max_transfers=2)
    batch = build(factory, shape)
    compute(batch, 1, ONE, shape)
    open_text(batch, 2, THREE)
    assert batch.stores() == batch.loads() == []
    assert (batch.num_host_blocks, batch.num_host_blocks_used, batch.host_hits_total) == (0, 0, 0)


def test_a_step_ahead_stores_what_it_takes(factory: BatchFactory) -> None:
    shape = BatchShape(num_blocks=4, block_size=4, max_len=40, num_host_blocks=3, max_transfers=2)
    batch = build(factory, shape)
    compute(batch, 1, ONE, shape)
    open_text(batch, 2, text(8, 50))  # the blocks that were never used
    plan_all(batch)
    batch.write(new_slot(), 1)
    assert batch.stores() == []
    batch.plan_ahead((), 100, 100, 100)
    assert len(batch.stores()) == 1
    slot = new_slot()
    batch.write(slot, 2)
    assert DEVICE_HEADER.unpack_from(slot, DEVICE_HEADER_OFFSET)[:2] == (1, 0)
    batch.apply([1])
    assert batch.num_host_blocks_used == 0
    batch.apply([2])
    assert batch.num_host_blocks_used == 1
    batch.check()


def test_a_block_that_is_loaded_by_the_step_before_is_not_built_upon(factory: BatchFactory) -> None:
    shape = BatchShape(num_blocks=6, block_size=4, max_len=40, num_host_blocks=3, max_transfers=2)
    batch = build(factory, shape)
    compute(batch, 1, ONE, shape)
    compute(batch, 2, text(24, 40), shape)
    open_text(batch, 3, text(2, 20))
    plan_all(batch)
    assert open_text(batch, 4, [*ONE, 9]) == 8
    batch.write(new_slot(shape), 1)
    assert batch.plan_ahead((), 100, 100, 100)[0] == 1
    assert [row.sequence_id for row in batch.rows_ahead()] == [3]
    batch.write(new_slot(shape), 2)
    batch.apply([1])
    assert batch.plan_ahead((), 100, 100, 100)[0] == 2
    batch.check()
