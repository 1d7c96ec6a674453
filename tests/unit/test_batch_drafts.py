"""Drafts: how many are planned, which tokens are taken, and what stays of the others."""

from array import array

import pytest

from batch_calls import SHAPE, close, fork, match, open_text, plan_all, step, text, write
from triptych.engine_core.batch import (
    FINISH_LENGTH,
    FINISH_NONE,
    FINISH_NOT_FINITE,
    FINISH_STOP,
    NOT_FINITE,
    UNKNOWN_DRAFT,
    Batch,
    Outcome,
)
from triptych.engine_core.ids import SequenceId
from triptych.engine_core.layout import STEP_HEADER

ONE, TWO, THREE = SequenceId(1), SequenceId(2), SequenceId(3)
NO_DRAFT = UNKNOWN_DRAFT - 1


def begun(batch: Batch, *numbers: int, size: int = 3, **changes: object) -> None:
    """Sequences of `size` tokens, all but the last computed; that one is output. The first one's
    are 0, 1 ..., the second one's 10, 11 ..."""
    for number in numbers:
        open_text(
            batch, number, text(size, 10 * number - 10), b"", 0, num_prompt=size - 1, **changes
        )
    assert batch.plan(1000, size - 1, 1000)
    write(batch)
    batch.apply([])


def drafted(batch: Batch, sequence_id: SequenceId, *guesses: int) -> None:
    """Everything is planned and written, with guesses for one."""
    batch.draft(sequence_id, guesses)
    plan_all(batch)
    write(batch)


def entries(outcome: Outcome) -> list[tuple[int, int, int]]:
    """(sample, token, finish)."""
    columns = outcome.samples, outcome.token_ids, outcome.finishes
    assert len(outcome.request_ids) == len(outcome.samples)
    return list(zip(*columns, strict=True))


def test_what_is_planned(batch: Batch) -> None:
    begun(batch, 1, 2)
    batch.draft(TWO, [20, 21])
    plan_all(batch)
    assert [tuple(row) for row in batch.rows()] == [(1, 2, 1, True), (2, 2, 3, True)]
    assert (batch.num_tokens, batch.num_rows, batch.num_logits) == (4, 2, 4)
    assert batch.samples() == (array("q", [1, 2, 2, 2]), array("i", [0, 1, 2, 3]))
    assert batch.drafts() == array("i", [NO_DRAFT, 20, 21, NO_DRAFT])


def test_what_is_written(batch: Batch) -> None:
    open_text(batch, 1, text(6), num_prompt=4, score_prompt=True)
    batch.draft(ONE, [30, UNKNOWN_DRAFT, UNKNOWN_DRAFT])
    plan_all(batch)
    assert batch.samples()[1].tolist() == [3, 4, 5, 6]
    slot = write(batch)
    assert STEP_HEADER.unpack_from(slot) == (1, 9, 1, 7, 0)

    def column(name: str, count: int) -> list[int]:
        offset, _ = SHAPE.layout.arrays[name]
        return slot[offset : offset + 4 * count].cast("i").tolist()

    assert column("token_ids", 9) == [*text(6), 30, -1, -1]
    assert column("positions", 9) == list(range(9))
    assert column("slots", 9) == list(range(9))
    assert column("row_starts", 2) == [0, 9]
    assert column("kv_lengths", 1) == [9]
    assert column("logits_tokens", 7) == [0, 1, 2, 5, 6, 7, 8]
    assert column("block_tables", 4) == [0, 1, 2, -1]


@pytest.mark.parametrize(
    ("drawn", "taken", "computed"),
    [
        ([20, 21, 22], [20, 21, 22], 5),
        ([20, 21, 7], [20, 21, 7], 5),
        ([20, 9, 22], [20, 9], 4),
        ([9, 21, 22], [9], 3),
        ([9, NOT_FINITE, NOT_FINITE], [9], 3),
        ([21, 20, 21], [21], 3),
    ],
)
def test_drafts_are_taken_as_far_as_they_are_drawn(
    batch: Batch, drawn: list[int], taken: list[int], computed: int
) -> None:
    begun(batch, 1)
    drafted(batch, ONE, 20, 21)
    outcome = batch.apply(drawn)
    assert entries(outcome) == [(i, token, FINISH_NONE) for i, token in enumerate(taken)]
    assert outcome.request_ids.tolist() == [1] * len(taken)
    assert batch.token_ids(ONE) == [*text(3), *taken]
    assert batch.num_computed(ONE) == computed
    plan_all(batch)
    assert [tuple(row) for row in batch.rows()] == [(1, computed, 1, True)]
    assert batch.drafts().tolist() == [NO_DRAFT], "guesses are for one step"


@pytest.mark.parametrize(
    ("changes", "complete", "drawn", "expected"),
    [
        ({"stop_token_ids": (21,)}, [], [20, 21, 22], [(0, 20, 0), (1, 21, FINISH_STOP)]),
        ({"stop_token_ids": (9,)}, [], [20, 9, 9], [(0, 20, 0), (1, 9, FINISH_STOP)]),
        ({"stop_token_ids": (22,)}, [], [20, 9, 22], [(0, 20, 0), (1, 9, 0)]),
        ({}, [0], [20, 21, 22], [(0, 20, FINISH_STOP)]),
        ({}, [1, 2], [20, 21, 22], [(0, 20, 0), (1, 21, FINISH_STOP)]),
        ({}, [2], [20, 9, 22], [(0, 20, 0), (1, 9, 0)]),
        ({}, [1], [20, NOT_FINITE, 22], [(0, 20, 0), (1, NOT_FINITE, FINISH_NOT_FINITE)]),
        ({}, [], [NOT_FINITE, 21, 22], [(0, NOT_FINITE, FINISH_NOT_FINITE)]),
        ({"max_tokens": 4}, [], [20, 21, 9], [(0, 20, 0), (1, 21, 0), (2, 9, FINISH_LENGTH)]),
        ({"max_tokens": 4}, [2], [20, 21, 9], [(0, 20, 0), (1, 21, 0), (2, 9, FINISH_STOP)]),
    ],
)
def test_the_first_token_that_ends_the_sequence_is_the_last(
    batch: Batch,
    changes: dict[str, object],
    complete: list[int],
    drawn: list[int],
    expected: list[tuple[int, int, int]],
) -> None:
    begun(batch, 1, size=3, **changes)
    drafted(batch, ONE, 20, 21)
    outcome = batch.apply(drawn, complete)
    assert entries(outcome) == expected
    if expected[-1][2]:
        count = sum(token >= 0 for _, token, _ in expected)
        assert (outcome.finished, outcome.finished_tokens) == ([1], [3 + count])
        assert (batch.sequence_ids(), batch.num_free_blocks) == ([], 8)


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({"max_tokens": 2}, 0), ({"max_tokens": 3}, 1), ({"max_tokens": 9}, 5),
        ({"max_len": 5}, 1), ({"max_len": 4}, 0),
    ],
)  # fmt: skip
def test_no_more_drafts_than_the_sequence_may_get(
    batch: Batch, changes: dict[str, object], most: int
) -> None:
    begun(batch, 1, size=3, **changes)
    batch.draft(ONE, [20, 21, 22, 23, 24])
    plan_all(batch)
    assert batch.num_tokens == 1 + most


@pytest.mark.parametrize(
    ("budget", "logits", "expected"),
    [
        (100, 100, [4, 1, 3]), (6, 100, [4, 1, 1]), (7, 100, [4, 1, 2]), (4, 100, [2, 1, 1]),
        (3, 100, [1, 1, 1]), (1, 100, [1, 1, 1]), (100, 4, [2, 1, 1]), (100, 7, [4, 1, 2]),
        (100, 3, [1, 1, 1]), (100, 0, [1, 1, 1]),
    ],
)  # fmt: skip
def test_the_first_in_order_get_what_is_left(
    batch: Batch, budget: int, logits: int, expected: list[int]
) -> None:
    begun(batch, 1, 2, 3)
    batch.draft(ONE, [50, 51, 52])
    batch.draft(THREE, [60, 61])
    assert batch.plan(budget, 1, logits), "most_per_sequence is not about drafts"
    assert [row.num_tokens for row in batch.rows()] == expected


def test_own_tokens_come_before_drafts(batch: Batch) -> None:
    begun(batch, 1)
    open_text(batch, 2, text(6, 10))
    batch.draft(ONE, [50, 51, 52])
    assert batch.plan(8, 100, 100)
    assert [row.num_tokens for row in batch.rows()] == [2, 6]
    assert batch.plan(6, 100, 100)
    assert [row.num_tokens for row in batch.rows()] == [1, 5]


def test_a_row_that_does_not_sample_has_no_drafts(batch: Batch) -> None:
    open_text(batch, 1, text(6), num_prompt=5)
    batch.draft(ONE, [50, 51])
    assert batch.plan(100, 4, 100)
    assert [row.num_tokens for row in batch.rows()] == [4]
    assert batch.drafts().tolist() == []


def test_a_later_sequence_gets_what_drafts_left(batch: Batch) -> None:
    begun(batch, 1)
    batch.draft(ONE, [50, 51])
    assert batch.plan(100, 100, 4)
    open_text(batch, 2, text(2, 10))
    assert batch.schedule(TWO, 100) == 2
    assert batch.num_logits == 4
    assert batch.samples()[1].tolist() == [0, 1, 2, 3]
    assert batch.drafts().tolist() == [50, 51, NO_DRAFT, NO_DRAFT]


# ------------------------------------------------------------------ blocks


def test_blocks_of_drafts_are_given_back(batch: Batch) -> None:
    begun(batch, 1, size=4)
    for ending in ("wrong", "abandoned", "planned anew", "right"):
        batch.draft(ONE, text(9, 50))
        plan_all(batch)
        assert batch.table(ONE) == [0, 1, 2, 3]
        assert batch.num_free_blocks == 4
        match ending:
            case "planned anew":
                batch.draft(ONE, [])
                plan_all(batch)
                batch.abandon()
            case "abandoned":
                write(batch)
                batch.abandon()
            case "wrong":
                write(batch)
                batch.apply([9] * 10)
            case "right":
                write(batch)
                batch.apply([*text(9, 50), 9])
        kept = {"wrong": 2, "right": 4}.get(ending, 2)
        assert batch.table(ONE) == list(range(kept))
        batch.check()


def test_drafts_take_free_blocks_only(batch: Batch) -> None:
    begun(batch, 1, size=8)
    open_text(batch, 2, text(18, 60))
    assert batch.num_free_blocks == 1
    batch.draft(ONE, text(9, 30))
    plan_all(batch)
    assert [row.num_tokens for row in batch.rows()] == [5, 18]
    assert batch.num_free_blocks == 0
    batch.check()


def test_the_last_block_is_for_tokens_not_for_drafts(batch: Batch) -> None:
    open_text(batch, 1, text(11))
    open_text(batch, 2, text(16, 20))
    step(batch)
    assert batch.num_free_blocks == 1
    batch.draft(ONE, text(5, 50))
    plan_all(batch)
    assert [row.num_tokens for row in batch.rows()] == [1, 1]
    assert (len(batch.table(ONE)), len(batch.table(TWO))) == (3, 5)


def test_drafts_behind_a_shared_block(batch: Batch) -> None:
    begun(batch, 1)
    fork(batch, 1, 2, num_prompt=2)
    batch.draft(ONE, [20, 21])
    batch.draft(TWO, [30, 31, 32])
    plan_all(batch)
    assert (batch.table(ONE), batch.table(TWO)) == ([1, 2], [0, 3])
    assert batch.copies() == [(0, 1)]
    write(batch)
    outcome = batch.apply([20, 21, 9, 9, 9, 9, 9])
    assert entries(outcome) == [(0, 20, 0), (1, 21, 0), (2, 9, 0), (3, 9, 0)]
    assert (batch.table(ONE), batch.table(TWO)) == ([1, 2], [0])


def test_a_block_filled_by_taken_drafts_is_found(batch: Batch) -> None:
    begun(batch, 1)
    drafted(batch, ONE, 20, 21, 22, 23, 24)
    batch.apply([20, 21, 22, 23, 9, 9])
    whole = [*text(3), 20, 21, 22, 23, 9]
    assert batch.num_cached_blocks == 1
    assert match(batch, [*whole, 1]) == (4, 4), "its second block lacks the token drawn last"
    step(batch)
    assert match(batch, [*whole, 1]) == (8, 0)
    assert match(batch, [*text(3), 20, 21, 22, 23, 24, 1]) == (7, 0), "but not what was not drawn"


def test_what_an_ended_sequence_has_computed_is_found(batch: Batch) -> None:
    begun(batch, 1, stop_token_ids=(22,))
    drafted(batch, ONE, 20, 21, 22, 23)
    batch.apply([20, 21, 22, 23, 9])
    assert match(batch, [*text(3), 20, 21, 22, 23, 9]) == (6, 0)


@pytest.mark.parametrize(("drawn", "found"), [([9, -1, -1], 3), ([20, -1, -1], 0)])
def test_logits_that_count_are_not_finite(batch: Batch, drawn: list[int], found: int) -> None:
    begun(batch, 1)
    drafted(batch, ONE, 20, 21)
    batch.apply(drawn)
    if batch.sequence_ids():
        close(batch, 1)
    assert match(batch, [*text(3), 5, 5]) == (found, 0)


# ------------------------------------------------------------------ out of the ordinary


def test_closed_in_flight(batch: Batch) -> None:
    begun(batch, 1, 2)
    batch.draft(TWO, [20])
    drafted(batch, ONE, 20, UNKNOWN_DRAFT)
    close(batch, 1)
    batch.fill_drafts([21])
    outcome = batch.apply([20, 21, 22, 20, 9])
    assert entries(outcome) == [(0, 20, 0), (3, 20, 0), (4, 9, 0)]
    assert outcome.request_ids.tolist() == [-1, 2, 2]
    assert match(batch, [*text(3), 20, 21, 22]) == (3, 0)
    close(batch, 2)
    assert batch.num_free_blocks == 8


def test_unknown_drafts_are_filled(batch: Batch) -> None:
    begun(batch, 1, 2)
    batch.draft(ONE, [20, UNKNOWN_DRAFT])
    batch.draft(TWO, [UNKNOWN_DRAFT, UNKNOWN_DRAFT])
    plan_all(batch)
    assert batch.drafts().tolist() == [20, -1, NO_DRAFT, -1, -1, NO_DRAFT]
    with pytest.raises(AssertionError):
        batch.fill_drafts([1, 2, 3])
    write(batch)
    for wrong in ([], [1, 2], [1, 2, 3, 4], [1, 2, -1]):
        with pytest.raises(ValueError, match="drafts"):
            batch.fill_drafts(wrong)
    with pytest.raises(AssertionError):
        batch.apply([9] * 6)
    batch.fill_drafts([21, 30, 31])
    assert batch.drafts().tolist() == [20, 21, NO_DRAFT, 30, 31, NO_DRAFT]
    batch.fill_drafts([])
    outcome = batch.apply([20, 21, 22, 30, 9, 9])
    assert outcome.token_ids.tolist() == [20, 21, 22, 30, 9]


def test_guesses_are_for_one_step(batch: Batch) -> None:
    begun(batch, 1)

    def planned() -> list[int]:
        plan_all(batch)
        return batch.drafts().tolist()[:-1]

    batch.draft(ONE, [20, 21])
    batch.draft(ONE, [22])
    assert planned() == planned() == [22], "the last call counts, for every try"
    batch.draft(ONE, [23])
    assert planned() == [23]
    batch.draft(ONE, [])
    assert planned() == []
    batch.draft(ONE, [24])
    batch.abandon()
    assert planned() == []
    batch.draft(ONE, [25])
    close(batch, 1)
    begun(batch, 1)
    assert planned() == []


def test_who_may_not_be_guessed_for(batch: Batch) -> None:
    open_text(batch, 1, text(3))
    open_text(batch, 2, text(3, 10), num_prompt=2, held=True)
    for number in (ONE, TWO):
        with pytest.raises(AssertionError):
            batch.draft(number, [1])
    with pytest.raises(KeyError):
        batch.draft(THREE, [1])
    step(batch)
    for guesses in ([-2], [UNKNOWN_DRAFT, 1], [5, UNKNOWN_DRAFT, 0]):
        with pytest.raises(AssertionError):
            batch.draft(ONE, guesses)
    with pytest.raises(OverflowError):
        batch.draft(ONE, [2**31])
    drafted(batch, ONE, 20)
    with pytest.raises(AssertionError):
        batch.draft(ONE, [20])
    with pytest.raises(AssertionError):
        fork(batch, 1, 3)
    assert batch.sequence_ids() == [1, 2]


def test_complete_are_samples_in_order(batch: Batch) -> None:
    begun(batch, 1)
    drafted(batch, ONE, 20)
    for complete in ([2], [-1], [1, 0], [0, 0]):
        with pytest.raises(AssertionError):
            batch.apply([9, 9], complete)
    assert entries(batch.apply([9, 9], [0, 1])) == [(0, 9, FINISH_STOP)]


def test_a_fork_has_no_drafts(batch: Batch) -> None:
    begun(batch, 1)
    batch.draft(ONE, [20])
    fork(batch, 1, 2)
    plan_all(batch)
    assert batch.drafts().tolist() == [20, NO_DRAFT, NO_DRAFT]
