"""The step ahead, call by call, for both twins."""

from array import array

import pytest

from batch_calls import SHAPE, close, fork, open_text, plan_all, step, text
from triptych.engine_core.batch import FINISH_STOP, NOT_FINITE, Batch
from triptych.engine_core.ids import SequenceId
from triptych.engine_core.layout import PREVIOUS_SAMPLE, STEP_HEADER

LAYOUT = SHAPE.layout
NOTHING = (0, 0, 0)


def new_slot() -> memoryview:
    return memoryview(bytearray(LAYOUT.slot_bytes))


def column(slot: memoryview, name: str, count: int) -> list[int]:
    offset, _ = LAYOUT.arrays[name]
    return slot[offset : offset + 4 * count].cast("i").tolist()


def begin(batch: Batch) -> None:
    """A step with everybody, in flight."""
    plan_all(batch)
    batch.write(new_slot(), 1)


def plan_ahead(batch: Batch, *host_drawn: int) -> tuple[int, int, int]:
    return batch.plan_ahead(host_drawn, 1000, 1000, 1000)


def write_ahead(batch: Batch, *host_drawn: int) -> memoryview:
    assert plan_ahead(batch, *host_drawn) != NOTHING
    slot = new_slot()
    batch.write(slot, 2)
    batch.check()
    return slot


def test_a_token_more_for_each_that_samples(batch: Batch) -> None:
    open_text(batch, 1, text(4))
    open_text(batch, 2, text(2, 20))
    begin(batch)
    assert plan_ahead(batch) == (2, 2, 2)
    assert batch.samples_ahead() == (array("q", [1, 2]), array("i", [0, 1]), array("i", [0, 1]))
    assert [tuple(row) for row in batch.rows_ahead()] == [(1, 4, 1, True), (2, 2, 1, True)]
    slot = new_slot()
    batch.write(slot, 2)
    assert STEP_HEADER.unpack_from(slot) == (2, 2, 2, 2, 0)
    assert column(slot, "token_ids", 2) == [PREVIOUS_SAMPLE, PREVIOUS_SAMPLE - 1]
    assert column(slot, "positions", 2) == [4, 2]
    assert column(slot, "kv_lengths", 2) == [5, 3]
    tables = [batch.table(SequenceId(number)) for number in (1, 2)]
    assert len(tables[0]) == 2, "a block for the token that nobody knows yet"
    assert column(slot, "slots", 2) == [4 * tables[0][1], 4 * tables[1][0] + 2]
    assert batch.token_ids(SequenceId(1)) == text(4), "nothing unknown leaks"
    batch.apply([7, 8])
    assert batch.token_ids(SequenceId(1)) == [*text(4), 7]
    assert batch.num_computed(SequenceId(1)) == 4
    assert batch.samples()[0].tolist() == [1, 2], "the step ahead is the one in flight now"
    assert batch.rows_ahead() == []
    batch.apply([9, 10])
    assert batch.token_ids(SequenceId(2)) == [20, 21, 8, 10]
    assert batch.num_computed(SequenceId(2)) == 3
    batch.check()
    close(batch, 1, 2)


def test_the_next_chunk_of_a_prompt_is_known(batch: Batch) -> None:
    open_text(batch, 1, text(10))
    assert batch.plan(4, 4, 10)
    batch.write(new_slot(), 1)
    assert batch.plan_ahead((), 4, 4, 10) == (1, 4, 0)
    slot = new_slot()
    batch.write(slot, 2)
    assert column(slot, "token_ids", 4) == [4, 5, 6, 7]
    batch.apply([])
    assert batch.plan_ahead((), 4, 4, 10) == (1, 2, 1)
    assert batch.samples_ahead()[2].tolist() == [-1]


def test_scored_prompt_tokens_of_the_next_chunk(batch: Batch) -> None:
    open_text(batch, 1, text(7), score_prompt=True)
    assert batch.plan(3, 3, 10)
    batch.write(new_slot(), 1)
    assert batch.plan_ahead((), 8, 8, 10) == (1, 4, 4)
    assert [tuple(score) for score in batch.scores_ahead()] == [(1, 0, 3, 3)]


def test_who_gets_no_row(batch: Batch) -> None:
    open_text(batch, 1, text(2))
    open_text(batch, 2, text(2, 10), max_tokens=1)
    open_text(batch, 3, text(2, 20), max_len=3)
    open_text(batch, 4, text(2, 30), held=True)
    open_text(batch, 5, text(2, 40))
    begin(batch)
    write_ahead(batch, 5)
    assert [row.sequence_id for row in batch.rows_ahead()] == [1]


def test_nobody_at_all(batch: Batch) -> None:
    open_text(batch, 1, text(2))
    begin(batch)
    assert plan_ahead(batch, 1) == NOTHING
    assert batch.samples_ahead() == (array("q"), array("i"), array("i"))
    batch.apply([3])
    batch.check()


def test_who_has_drafts_now_has_no_row(batch: Batch) -> None:
    open_text(batch, 1, text(2))
    step(batch, 5)
    batch.draft(SequenceId(1), [6, 7])
    begin(batch)
    assert plan_ahead(batch) == NOTHING


def test_who_had_no_row_gets_one_ahead(batch: Batch) -> None:
    open_text(batch, 1, text(2))
    open_text(batch, 2, text(2, 10))
    begin(batch)
    write_ahead(batch, 2)
    batch.apply([5, 6])
    slot = new_slot()
    assert plan_ahead(batch) == (2, 2, 2)
    batch.write(slot, 3)
    assert column(slot, "token_ids", 2) == [PREVIOUS_SAMPLE, 6]
    assert batch.samples_ahead()[2].tolist() == [0, -1]


def test_without_blocks_there_is_no_step_and_nothing_is_taken(batch: Batch) -> None:
    open_text(batch, 1, text(28))
    open_text(batch, 2, text(4, 40))
    begin(batch)
    assert batch.num_free_blocks == 0
    assert plan_ahead(batch) == NOTHING, "one of them needs a block more"
    batch.check()
    batch.apply([1, 2])


def test_who_ends_gives_its_blocks_back_when_the_step_ahead_is_over(batch: Batch) -> None:
    open_text(batch, 1, text(5), stop_token_ids=(3,))
    open_text(batch, 2, text(2, 10))
    begin(batch)
    write_ahead(batch)
    free = batch.num_free_blocks
    outcome = batch.apply([3, 4])
    assert outcome.finished == [1]
    assert outcome.finishes[0] == FINISH_STOP
    assert batch.num_free_blocks == free
    batch.check()
    outcome = batch.apply([8, 9])
    assert outcome.request_ids.tolist() == [-1, 2]
    assert batch.num_free_blocks == free + 2
    batch.check()


def test_an_ended_one_without_a_row_gives_them_back_at_once(batch: Batch) -> None:
    open_text(batch, 1, text(5), max_tokens=1)
    open_text(batch, 2, text(2, 10))
    begin(batch)
    write_ahead(batch)
    free = batch.num_free_blocks
    batch.apply([3, 4])
    assert batch.num_free_blocks == free + 2
    batch.check()


def test_what_a_wasted_row_computed_can_be_found_if_its_token_is_known(batch: Batch) -> None:
    open_text(batch, 1, text(3), stop_token_ids=(3,))
    open_text(batch, 2, text(3, 10))
    begin(batch)
    write_ahead(batch)
    batch.apply([3, 13])
    close(batch, 2)
    batch.apply([8, 9])
    batch.check()
    assert batch.match([0, 1, 2, 3, 4], batch.prefix_digests([0, 1, 2, 3, 4], b""))[0] == 4
    asked = [10, 11, 12, 13, 9, 9]
    assert batch.match(asked, batch.prefix_digests(asked, b""))[0] == 4


def test_an_aborted_one_leaves_nothing_of_a_token_that_nobody_was_told(batch: Batch) -> None:
    open_text(batch, 1, text(3))
    open_text(batch, 2, text(3, 10))
    begin(batch)
    write_ahead(batch)
    close(batch, 1)
    assert batch.apply([3, 13]).request_ids.tolist() == [-1, 2]
    assert batch.apply([4, 14]).request_ids.tolist() == [-1, 2]
    batch.check()
    assert batch.match([0, 1, 2, 3, 4], batch.prefix_digests([0, 1, 2, 3, 4], b""))[0] == 3


def test_logits_that_are_not_finite_end_one_with_a_row_ahead(batch: Batch) -> None:
    open_text(batch, 1, text(5))
    begin(batch)
    write_ahead(batch)
    assert batch.apply([NOT_FINITE]).finished == [1]
    batch.apply([0])
    batch.check()
    assert batch.num_free_blocks == 8
    assert batch.num_cached_blocks == 0


def test_two_forks_copy_their_shared_block_in_the_step_ahead(batch: Batch) -> None:
    open_text(batch, 1, text(3))
    plan_all(batch)
    fork(batch, 1, 2)
    first = new_slot()
    batch.write(first, 1)
    slot = write_ahead(batch)
    (shared,) = batch.table(SequenceId(2))
    (own,) = batch.table(SequenceId(1))
    assert STEP_HEADER.unpack_from(slot) == (2, 2, 2, 2, 1)
    assert column(slot, "copy_sources", 1) == [shared]
    assert column(slot, "copy_targets", 1) == [own]
    assert column(slot, "token_ids", 2) == [PREVIOUS_SAMPLE, PREVIOUS_SAMPLE - 1]
    batch.apply([5, 6])
    assert batch.copies() == [(shared, own)], "due until the step ahead is over"
    batch.check()
    batch.apply([7, 8])
    assert batch.copies() == []
    close(batch, 1, 2)
    assert batch.num_free_blocks == 8


def test_when_the_older_one_is_abandoned_its_sequences_must_go(batch: Batch) -> None:
    open_text(batch, 1, text(3))
    open_text(batch, 2, text(3, 10))
    begin(batch)
    write_ahead(batch, 2)
    batch.abandon()
    with pytest.raises(AssertionError):
        batch.apply([5])
    with pytest.raises(AssertionError):
        plan_ahead(batch)
    batch.check()
    close(batch, 1)
    assert batch.apply([5]).request_ids.tolist() == [-1]
    assert batch.num_computed(SequenceId(2)) == 0
    step(batch, 13)
    close(batch, 2)
    assert batch.num_free_blocks == 8
    found = batch.match([0, 1, 2, 3], batch.prefix_digests([0, 1, 2, 3], b""))
    assert found[0] == 0, "nothing of it is in the cache"


def test_both_may_be_abandoned(batch: Batch) -> None:
    open_text(batch, 1, text(4))
    begin(batch)
    write_ahead(batch)
    batch.abandon()
    batch.abandon()
    batch.check()
    assert len(batch.table(SequenceId(1))) == 1, "the block for the unknown token is given back"
    step(batch, 5)
    assert batch.token_ids(SequenceId(1)) == [*text(4), 5]
    close(batch, 1)


def test_out_of_turn(batch: Batch) -> None:
    open_text(batch, 1, text(2))
    with pytest.raises(AssertionError):
        plan_ahead(batch)
    plan_all(batch)
    with pytest.raises(AssertionError):
        plan_ahead(batch)
    batch.write(new_slot(), 1)
    assert plan_ahead(batch) == (1, 1, 1)
    for wrong in (
        lambda: plan_ahead(batch),
        lambda: batch.apply([1]),
        lambda: batch.plan(10, 10, 10),
        lambda: fork(batch, 1, 2),
    ):
        with pytest.raises(AssertionError):
            wrong()
    batch.write(new_slot(), 2)
    with pytest.raises(AssertionError):
        batch.write(new_slot(), 3)
    batch.apply([1])
    with pytest.raises(AssertionError):
        fork(batch, 1, 2)
    batch.apply([1])
    fork(batch, 1, 2)


def test_a_block_that_the_step_before_fills_by_a_copy_is_not_built_upon(batch: Batch) -> None:
    open_text(batch, 1, text(6))
    step(batch)
    close(batch, 1)
    open_text(batch, 2, text(2, 20))
    plan_all(batch)
    assert open_text(batch, 3, [*text(6), 9, 9]) == 6, "two tokens by copy"
    batch.write(new_slot(), 1)
    write_ahead(batch)
    assert [row.sequence_id for row in batch.rows_ahead()] == [2], "should it fail, 3 has nothing"
    batch.apply([1])
    assert plan_ahead(batch) == (2, 3, 2), "now the copy is made"
