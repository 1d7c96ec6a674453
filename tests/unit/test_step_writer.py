"""One slot, checked number by number, for both twins."""

import pytest

from triptych.engine_core.ids import SequenceId
from triptych.engine_core.layout import STEP_HEADER, StepLayout
from triptych.engine_core.step import ScheduledSequence
from triptych.engine_core.twins import Twins, python_twins
from triptych.kernels.core import native_twins

LAYOUT = StepLayout(num_slots=1, max_tokens=8, max_rows=3, max_blocks_per_row=4)
ONE, TWO = SequenceId(1), SequenceId(2)


@pytest.fixture(params=[python_twins, native_twins], ids=["python", "native"])
def twins(request: pytest.FixtureRequest) -> Twins:
    pair: Twins = request.param(8, 2, LAYOUT)
    return pair


def column(slot: memoryview, name: str, count: int) -> list[int]:
    offset, _ = LAYOUT.arrays[name]
    return slot[offset : offset + 4 * count].cast("i").tolist()


def test_a_step_of_a_decode_and_a_chunk(twins: Twins) -> None:
    twins.kv_cache.reserve(TWO, 2)
    twins.kv_cache.reserve(ONE, 5)
    twins.step_writer.open(ONE, [10, 11, 12, 13])
    twins.step_writer.open(TWO, [20, 21])
    twins.step_writer.append([ONE], [14])
    slot = memoryview(bytearray(LAYOUT.slot_bytes))
    twins.step_writer.write(
        slot, 2**40, [ScheduledSequence(TWO, 1, 1, True), ScheduledSequence(ONE, 2, 3, False)]
    )
    assert STEP_HEADER.unpack_from(slot) == (2**40, 4, 2, 1, 0)
    assert column(slot, "token_ids", 4) == [21, 12, 13, 14]
    assert column(slot, "positions", 4) == [1, 2, 3, 4]
    assert column(slot, "slots", 4) == [1, 4, 5, 6]
    assert column(slot, "row_starts", 3) == [0, 1, 4]
    assert column(slot, "kv_lengths", 2) == [2, 5]
    assert column(slot, "logits_rows", 2) == [0, -1]
    assert column(slot, "block_tables", 8) == [0, -1, -1, -1, 1, 2, 3, -1]


def test_what_does_not_fit_is_refused(twins: Twins) -> None:
    writer = twins.step_writer
    twins.kv_cache.reserve(ONE, 4)
    writer.open(ONE, [1, 2, 3, 4, 5])
    slot = memoryview(bytearray(LAYOUT.slot_bytes))
    with pytest.raises(ValueError, match="slot: 8 bytes"):
        writer.write(slot[:8], 1, [])
    with pytest.raises(ValueError, match="rows: 4 rows of 4 tokens, the layout has 3 of 8"):
        writer.write(slot, 1, [ScheduledSequence(ONE, 0, 1, True)] * 4)
    with pytest.raises(ValueError, match="rows: tokens 4 to 6 of sequence 1, which has 5"):
        writer.write(slot, 1, [ScheduledSequence(ONE, 4, 2, True)])
    with pytest.raises(ValueError, match="rows: 2 blocks of sequence 1 for 5 tokens"):
        writer.write(slot, 1, [ScheduledSequence(ONE, 4, 1, True)])
    assert bytes(slot) == bytes(LAYOUT.slot_bytes)


def test_a_closed_sequence_is_unknown(twins: Twins) -> None:
    twins.step_writer.open(ONE, [1])
    assert twins.step_writer.token_ids(ONE) == [1]
    twins.step_writer.close(ONE)
    assert twins.step_writer.sequence_ids() == []
    with pytest.raises(KeyError):
        twins.step_writer.token_ids(ONE)
