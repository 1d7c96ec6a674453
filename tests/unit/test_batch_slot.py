"""One slot, checked number by number, for both twins."""

import pytest

from batch_calls import SHAPE, close, fork, open_text, plan_all, step, text, write
from batch_model import BatchFactory
from batch_twins import TWINS
from triptych.engine_core.batch import Batch
from triptych.engine_core.ids import SequenceId
from triptych.engine_core.layout import STEP_HEADER, StepLayout

LAYOUT = SHAPE.layout


def column(slot: memoryview, name: str, count: int, layout: StepLayout = LAYOUT) -> list[int]:
    offset, _ = layout.arrays[name]
    return slot[offset : offset + 4 * count].cast("i").tolist()


def test_a_step_of_a_decode_a_scored_chunk_and_a_copy(batch: Batch) -> None:
    open_text(batch, 1, text(3, 10))
    step(batch, 13)
    fork(batch, 1, 2)
    open_text(batch, 3, text(6, 30), score_prompt=True)
    assert batch.plan(7, 5, 100)
    slot = memoryview(bytearray(b"\x55" * LAYOUT.slot_bytes))
    batch.write(slot, 2**40)
    assert STEP_HEADER.unpack_from(slot) == (2**40, 7, 3, 7, 1)
    assert column(slot, "token_ids", 7) == [13, 13, 30, 31, 32, 33, 34]
    assert column(slot, "positions", 7) == [3, 3, 0, 1, 2, 3, 4]
    assert column(slot, "slots", 7) == [15, 3, 4, 5, 6, 7, 8]
    assert column(slot, "row_starts", 4) == [0, 1, 2, 7]
    assert column(slot, "kv_lengths", 3) == [4, 4, 5]
    assert column(slot, "logits_tokens", 7) == [0, 1, 2, 3, 4, 5, 6]
    assert column(slot, "copy_sources", 1) == [0]
    assert column(slot, "copy_targets", 1) == [3]
    width = LAYOUT.max_blocks_per_row
    tables = column(slot, "block_tables", 3 * width)
    rows = [tables[row * width : (row + 1) * width] for row in range(3)]
    assert rows == [[b, *[-1] * (width - 1)] for b in (3, 0)] + [[1, 2, *[-1] * (width - 2)]]
    for name, count in (("token_ids", 7), ("row_starts", 4), ("logits_tokens", 7)):
        assert column(slot, name, count + 1)[count] == 0x55555555, "what is beyond is left alone"


def test_a_chunk_in_the_middle_has_no_logits(batch: Batch) -> None:
    open_text(batch, 1, text(6))
    assert batch.plan(3, 3, 3)
    assert STEP_HEADER.unpack_from(write(batch)) == (1, 3, 1, 0, 0)


@pytest.mark.parametrize("factory", TWINS, ids=["python", "native"])
@pytest.mark.parametrize(
    ("limits", "named"),
    [
        ((1, 50, 20, 20, 50), None),
        ((1, 6, 2, 2, 2), None),
        ((1, 5, 2, 2, 2), "tokens: 6, the layout has 5"),
        ((1, 6, 1, 2, 2), "rows: 2, the layout has 1"),
        ((1, 6, 2, 1, 2), "blocks: 2.*, the layout has 1"),
        ((1, 6, 2, 2, 1), "logits: 2, the layout has 1"),
    ],
)
def test_what_exceeds_the_layout_is_refused(
    factory: BatchFactory, limits: tuple[int, int, int, int, int], named: str | None
) -> None:
    layout = StepLayout(*limits)
    batch = factory(8, 4, layout, True)
    open_text(batch, 1, text(5))
    open_text(batch, 2, [9])
    plan_all(batch)
    slot = memoryview(bytearray(layout.slot_bytes))
    if named is None:
        batch.write(slot, 1)
        return
    with pytest.raises(ValueError, match=named):
        batch.write(slot, 1)
    assert bytes(slot) == bytes(layout.slot_bytes)
    batch.abandon()
    batch.check()


@pytest.mark.parametrize("factory", TWINS, ids=["python", "native"])
def test_more_copies_than_the_layout_has_are_refused(factory: BatchFactory) -> None:
    layout = StepLayout(1, 10, 1, 4, 10)
    batch = factory(8, 4, layout, True)
    open_text(batch, 1, text(3), held=True)
    step(batch)
    batch.append(SequenceId(1), 4)
    for number in (2, 3):  # each time the copy that is due is copied again
        fork(batch, 1, number, held=True)
        plan_all(batch)
        close(batch, number)
        batch.abandon()
    plan_all(batch)
    with pytest.raises(ValueError, match="copies: 2, the layout has 1"):
        batch.write(memoryview(bytearray(layout.slot_bytes)), 1)


def test_a_short_slot_is_refused(batch: Batch) -> None:
    open_text(batch, 1, [1])
    plan_all(batch)
    with pytest.raises(ValueError, match="slot: 8 bytes"):
        batch.write(memoryview(bytearray(8)), 1)
    write(batch)
