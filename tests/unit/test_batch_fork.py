"""Forks share blocks until one of them writes; in flight they share a row and its logits."""

import pytest

from batch_calls import close, fork, open_text, plan_all, rules, step, text, write
from triptych.engine_core.batch import NOT_FINITE, Batch
from triptych.engine_core.ids import SequenceId

ONE, TWO, THREE = SequenceId(1), SequenceId(2), SequenceId(3)


def test_a_fork_in_flight_samples_from_the_same_logits(batch: Batch) -> None:
    open_text(batch, 1, text(6))
    open_text(batch, 9, text(2, 90))
    plan_all(batch)
    fork(batch, 1, 2)
    write(batch)
    fork(batch, 1, 3)
    ids, logits_rows = batch.samples()
    assert ids.tolist() == [1, 9, 2, 3]
    assert logits_rows.tolist() == [0, 1, 0, 0]
    assert batch.num_logits == 2
    outcome = batch.apply([50, 60, 51, 52])
    assert outcome.request_ids.tolist() == [1, 9, 2, 3]
    for number, token in ((ONE, 50), (TWO, 51), (THREE, 52)):
        assert batch.token_ids(number) == [*text(6), token]
        assert batch.num_computed(number) == 6
        assert batch.table(number) == [0, 1]
    assert batch.num_free_blocks == 5


def test_the_last_to_write_needs_no_copy(batch: Batch) -> None:
    open_text(batch, 1, text(6))
    plan_all(batch)
    fork(batch, 1, 2)
    fork(batch, 1, 3)
    write(batch)
    batch.apply([50, 51, 52])
    plan_all(batch)
    assert batch.copies() == [(1, 2), (1, 3)]
    assert [batch.table(n) for n in (ONE, TWO, THREE)] == [[0, 2], [0, 3], [0, 1]]
    write(batch)
    batch.apply([9, 9, 9])
    plan_all(batch)
    assert batch.copies() == []
    assert batch.num_free_blocks == 4


def test_a_block_that_is_full_is_not_copied(batch: Batch) -> None:
    open_text(batch, 1, text(4))
    plan_all(batch)
    fork(batch, 1, 2)
    write(batch)
    batch.apply([50, 51])
    plan_all(batch)
    assert batch.copies() == []
    assert [batch.table(n) for n in (ONE, TWO)] == [[0, 1], [0, 2]]


def test_a_shared_block_without_content_is_replaced_without_a_copy(batch: Batch) -> None:
    open_text(batch, 1, text(6))
    fork(batch, 1, 2)
    plan_all(batch)
    assert batch.copies() == []
    assert [batch.table(n) for n in (ONE, TWO)] == [[2, 3], [0, 1]]
    step(batch)


def test_only_the_blocks_of_the_chunk_are_replaced(batch: Batch) -> None:
    open_text(batch, 1, text(12))
    fork(batch, 1, 2)
    assert batch.plan(7, 100, 100)
    assert [row[2] for row in batch.rows()] == [6, 1]
    assert [batch.table(n) for n in (ONE, TWO)] == [[3, 4, 2], [0, 1, 2]]
    write(batch)
    batch.apply([])
    step(batch)
    assert batch.token_ids(ONE) == batch.token_ids(TWO)


def test_forks_for_which_no_block_is_left(batch: Batch) -> None:
    open_text(batch, 1, text(27))
    plan_all(batch)
    for number in (2, 3):
        fork(batch, 1, number)
    write(batch)
    batch.apply([50, 51, 52])
    assert batch.num_free_blocks == 1
    assert not batch.plan(10, 10, 10)
    assert batch.table(ONE)[-1] == 7, "the first has its copy"
    close(batch, 3)
    plan_all(batch)
    assert batch.copies() == [(6, 7)]
    assert batch.table(TWO)[-1] == 6, "the other one writes where it was"


def test_a_fork_of_a_chunk_rides_on_it(batch: Batch) -> None:
    open_text(batch, 1, text(6))
    assert batch.plan(5, 5, 5)
    fork(batch, 1, 2)
    write(batch)
    assert batch.samples()[0].tolist() == []
    batch.apply([])
    assert (batch.num_computed(ONE), batch.num_computed(TWO)) == (5, 5)


def test_a_fork_of_a_fork_rides_on_the_same_row(batch: Batch) -> None:
    open_text(batch, 1, text(3))
    plan_all(batch)
    fork(batch, 1, 2)
    fork(batch, 2, 3)
    with pytest.raises(AssertionError):
        batch.schedule(TWO, 1)
    close(batch, 1)
    close(batch, 2)
    write(batch)
    outcome = batch.apply([50, 51, 52])
    assert outcome.request_ids.tolist() == [-1, -1, 3]
    assert batch.table(THREE) == [0]
    step(batch)
    assert batch.token_ids(THREE) == [*text(3), 52, 9]


def test_a_fork_ends_by_its_own_rules(batch: Batch) -> None:
    open_text(batch, 1, text(3))
    plan_all(batch)
    fork(batch, 1, 2, stop_token_ids=(51,))
    fork(batch, 1, 3, held=True)
    write(batch)
    outcome = batch.apply([50, 51, 52])
    assert outcome.request_ids.tolist() == [1, 2, -1]
    assert outcome.finishes.tolist() == [0, 1, 0]
    assert batch.sequence_ids() == [1, 3]
    assert batch.token_ids(THREE) == text(3)


def test_after_an_abandoned_step_a_fork_computes_for_itself(batch: Batch) -> None:
    open_text(batch, 1, text(6))
    plan_all(batch)
    fork(batch, 1, 2)
    write(batch)
    batch.abandon()
    batch.check()
    plan_all(batch)
    assert [(row[0], row[1], row[2]) for row in batch.rows()] == [(1, 0, 6), (2, 0, 6)]


def test_copies_of_an_abandoned_step_are_still_due(batch: Batch) -> None:
    open_text(batch, 1, text(6))
    plan_all(batch)
    fork(batch, 1, 2)
    write(batch)
    batch.apply([50, 51])
    for _ in range(2):
        plan_all(batch)
        write(batch)
        assert batch.copies() == [(1, 2)]
        batch.abandon()
    step(batch)
    assert batch.copies() == []


def test_copies_are_made_in_the_order_in_which_they_fell_due(batch: Batch) -> None:
    """A copy that is still due is the source of another one."""
    open_text(batch, 1, text(3))
    step(batch)
    close(batch, 1)
    open_text(batch, 2, text(3))
    fork(batch, 2, 3)
    plan_all(batch)
    assert batch.copies() == [(0, 1), (1, 2)]
    assert [batch.table(n) for n in (TWO, THREE)] == [[2], [1]]
    close(batch, 3)
    batch.abandon()
    assert batch.copies() == [(0, 1), (1, 2)], "the first is what the second copies"
    close(batch, 2)
    assert (batch.copies(), batch.num_free_blocks) == ([], 8)


def test_a_held_beam_goes_on_in_two(batch: Batch) -> None:
    open_text(batch, 1, text(5), held=True)
    step(batch)
    fork(batch, 1, 2, held=True)
    batch.append(ONE, 50)
    batch.append(TWO, 51)
    plan_all(batch)
    assert batch.copies() == [(1, 2)]
    write(batch)
    batch.apply([1, 2])
    assert [batch.token_ids(n)[-1] for n in (ONE, TWO)] == [50, 51]
    close(batch, 1)
    assert batch.num_free_blocks == 6


def test_a_waiting_holder_keeps_its_block(batch: Batch) -> None:
    open_text(batch, 1, text(5), held=True)
    step(batch)
    fork(batch, 1, 2, held=True)
    batch.append(ONE, 50)
    step(batch)
    assert [batch.table(n) for n in (ONE, TWO)] == [[0, 2], [0, 1]]


def test_forks_share_what_is_not_finite(batch: Batch) -> None:
    open_text(batch, 1, text(6))
    plan_all(batch)
    fork(batch, 1, 2)
    write(batch)
    outcome = batch.apply([NOT_FINITE, NOT_FINITE])
    assert outcome.finished == [1, 2]
    assert (batch.num_free_blocks, batch.num_cached_blocks) == (8, 0)


def test_a_fork_of_an_uncached_sequence_is_not_cached(batch: Batch) -> None:
    open_text(batch, 1, text(4), cached=False)
    plan_all(batch)
    fork(batch, 1, 2, cached=True)
    write(batch)
    batch.apply([50, 51])
    assert batch.num_cached_blocks == 0


def test_an_id_that_is_open_again_has_no_row(batch: Batch) -> None:
    """Preempted and admitted again while the step is planned."""
    open_text(batch, 1, text(4))
    plan_all(batch)
    close(batch, 1)
    open_text(batch, 1, text(4), spare=0)
    fork(batch, 1, 2)
    assert batch.schedule(ONE, 10) == 4
    assert batch.schedule(TWO, 10) == 4
    write(batch)
    outcome = batch.apply([5, 6, 7])
    assert outcome.request_ids.tolist() == [-1, 1, 2]


def test_unused_slots_of_a_shared_block_count_once(batch: Batch) -> None:
    open_text(batch, 1, text(5))
    assert batch.num_unused_slots == 3
    fork(batch, 1, 2)
    assert batch.num_unused_slots == 3
    batch.open(THREE, [1], batch.prefix_digests([1], b""), rules(1), 0, 0)
    assert batch.num_unused_slots == 6
