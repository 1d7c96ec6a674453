"""Opening, planning, applying and closing, without prefix hits and forks."""

import pytest

from batch_calls import SHAPE, build, close, open_text, plan_all, rules, step, text, write
from batch_model import BatchFactory
from batch_twins import TWINS
from triptych.engine_core.batch import (
    FINISH_LENGTH,
    FINISH_NONE,
    FINISH_NOT_FINITE,
    FINISH_STOP,
    NOT_FINITE,
    Batch,
    Score,
)
from triptych.engine_core.ids import SequenceId

ONE, TWO, THREE = SequenceId(1), SequenceId(2), SequenceId(3)


def planned(batch: Batch) -> list[tuple[int, int, int, bool]]:
    return [(int(row[0]), row[1], row[2], row[3]) for row in batch.rows()]


def test_a_sequence_from_beginning_to_end(batch: Batch) -> None:
    assert open_text(batch, 1, text(6), max_tokens=2) == 0
    assert (batch.num_free_blocks, batch.table(ONE), batch.num_unused_slots) == (6, [0, 1], 2)
    plan_all(batch)
    assert planned(batch) == [(1, 0, 6, True)]
    assert (batch.num_tokens, batch.num_rows, batch.num_logits) == (6, 1, 1)
    write(batch)
    outcome = batch.apply([7])
    assert outcome.request_ids.tolist() == [1]
    assert outcome.finishes.tolist() == [FINISH_NONE]
    assert outcome.finished == []
    assert (batch.token_ids(ONE), batch.num_computed(ONE)) == ([*text(6), 7], 6)
    assert (batch.num_tokens, batch.num_rows, batch.rows()) == (0, 0, [])
    outcome = step(batch, 8)
    assert outcome.token_ids.tolist() == [8]
    assert outcome.finishes.tolist() == [FINISH_LENGTH]
    assert (outcome.finished, outcome.finished_tokens) == ([1], [8])
    assert (batch.sequence_ids(), batch.num_free_blocks) == ([], 8)


def test_a_table_grows_by_a_block_when_tokens_need_it(batch: Batch) -> None:
    open_text(batch, 1, text(4))
    step(batch)
    assert batch.table(ONE) == [0]
    plan_all(batch)
    assert batch.table(ONE) == [0, 1]


@pytest.mark.parametrize(
    ("token", "changes", "finish"),
    [
        (5, {"stop_token_ids": (5, 6)}, FINISH_STOP),
        (6, {"stop_token_ids": (5, 6)}, FINISH_STOP),
        (7, {"stop_token_ids": (5, 6)}, FINISH_NONE),
        (7, {"max_tokens": 1}, FINISH_LENGTH),
        (5, {"max_tokens": 1, "stop_token_ids": (5,)}, FINISH_STOP),
        (7, {"max_len": 4}, FINISH_LENGTH),
        (7, {"max_len": 5, "max_tokens": 2}, FINISH_NONE),
        (NOT_FINITE, {"max_tokens": 1}, FINISH_NOT_FINITE),
        (7, {"num_prompt": 1, "max_tokens": 3}, FINISH_LENGTH),
        (7, {"num_prompt": 1, "max_tokens": 4}, FINISH_NONE),
    ],
)
def test_how_a_sequence_ends(
    batch: Batch, token: int, changes: dict[str, object], finish: int
) -> None:
    open_text(batch, 1, text(3), b"", 0, **changes)
    outcome = step(batch, token)
    assert outcome.finishes.tolist() == [finish]
    assert outcome.token_ids.tolist() == [token]
    num_tokens = 3 if token == NOT_FINITE else 4
    assert outcome.finished == ([1] if finish else [])
    assert outcome.finished_tokens == ([num_tokens] if finish else [])
    assert batch.sequence_ids() == ([] if finish else [1])


def test_sequences_stand_where_they_are_put(batch: Batch) -> None:
    open_text(batch, 1, text(1))
    batch.open(TWO, [5], batch.prefix_digests([5], b""), rules(1), 0, 0)
    batch.open(THREE, [6], batch.prefix_digests([6], b""), rules(1), 1, 0)
    assert batch.sequence_ids() == [2, 3, 1]
    plan_all(batch)
    assert [row[0] for row in planned(batch)] == [2, 3, 1]
    assert batch.samples()[0].tolist() == [2, 3, 1]
    assert batch.samples()[1].tolist() == [0, 1, 2]


def test_everybody_gets_a_token_and_the_first_get_the_rest(batch: Batch) -> None:
    for number, size in ((1, 5), (2, 4), (3, 1)):
        open_text(batch, number, text(size, 10 * number))
    for budget, most, expected in (
        (3, 100, [1, 1, 1]),
        (1, 100, [1, 1, 1]),
        (6, 100, [4, 1, 1]),
        (9, 100, [5, 3, 1]),
        (100, 100, [5, 4, 1]),
        (100, 3, [3, 3, 1]),
        (100, 1, [1, 1, 1]),
    ):
        assert batch.plan(budget, most, 100)
        assert [row[2] for row in planned(batch)] == expected, (budget, most)
        assert [row[3] for row in planned(batch)] == [
            e == n for e, n in zip(expected, (5, 4, 1), strict=True)
        ]


def test_a_chunk_goes_on_where_the_last_one_ended(batch: Batch) -> None:
    open_text(batch, 1, text(7))
    starts = []
    while batch.num_computed(ONE) < 7:
        assert batch.plan(3, 3, 3)
        starts += planned(batch)
        write(batch)
        batch.apply([9] * len(batch.samples()[0]))
    assert starts == [(1, 0, 3, False), (1, 3, 3, False), (1, 6, 1, True)]


def test_a_sequence_opened_after_the_plan_is_scheduled(batch: Batch) -> None:
    open_text(batch, 1, text(2))
    assert batch.plan(10, 6, 10)
    open_text(batch, 2, text(9, 20))
    assert batch.schedule(TWO, 100) == 6
    assert planned(batch) == [(1, 0, 2, True), (2, 0, 6, False)]
    open_text(batch, 3, text(3, 40))
    assert batch.schedule(THREE, 0) == 0
    assert batch.schedule(THREE, 2) == 2
    assert planned(batch)[2:] == [(3, 0, 2, False)]
    write(batch)
    batch.apply([9])
    assert [batch.num_computed(n) for n in (ONE, TWO, THREE)] == [2, 6, 2]


def test_the_first_rows_may_be_of_new_sequences(batch: Batch) -> None:
    assert batch.plan(10, 10, 10)
    open_text(batch, 1, text(2))
    assert batch.schedule(ONE, 10) == 2
    write(batch)
    assert batch.apply([9]).request_ids.tolist() == [1]


def test_blocks_lack(batch: Batch) -> None:
    """The first keeps what it got; closing the last one makes room."""
    for number in (1, 2):
        open_text(batch, number, text(16, 20 * number))
    step(batch)
    assert not batch.plan(10, 10, 10)
    assert (batch.num_rows, batch.rows()) == (0, [])
    close(batch, 2)
    assert batch.num_free_blocks == 4
    plan_all(batch)
    assert batch.num_free_blocks == 3
    assert planned(batch) == [(1, 16, 1, True)]


def test_logits_of_prompts_are_scored_in_order(batch: Batch) -> None:
    open_text(batch, 1, text(2))
    open_text(batch, 2, text(6, 10), score_prompt=True)
    plan_all(batch)
    assert batch.scores() == [Score(TWO, 1, 0, 5)]
    assert batch.samples()[1].tolist() == [0, 6]
    assert batch.num_logits == 7
    step(batch)
    plan_all(batch)
    assert batch.scores() == []


def test_the_logits_budget_bounds_what_a_scoring_sequence_gets(batch: Batch) -> None:
    """One row is kept for each running sequence; what is left is for those that score."""
    open_text(batch, 1, text(5), score_prompt=True)
    open_text(batch, 2, text(3, 10))
    scored = []
    for budget, expected in ((4, (0, 3)), (3, (3, 2))):
        assert batch.plan(100, 100, budget)
        assert planned(batch)[0][1:3] == expected
        scored += [tuple(score) for score in batch.scores()]
        assert batch.num_logits <= max(budget, 2)
        write(batch)
        batch.apply([9] * len(batch.samples()[0]))
    assert scored == [(1, 0, 0, 3), (1, 0, 3, 1)]


@pytest.mark.parametrize(
    ("allowed", "got"), [(0, 0), (1, 1), (3, 3), (4, 4), (5, 6), (6, 7), (9, 7)]
)
def test_scoring_fits_any_number_of_logits(batch: Batch, allowed: int, got: int) -> None:
    """Five scored prompt tokens, one that needs no logits, and the last, which samples. With 5
    rows of logits the last one waits."""
    assert batch.plan(100, 100, allowed)
    open_text(batch, 1, text(7), num_prompt=6, score_prompt=True)
    assert batch.schedule(ONE, 100) == got
    assert batch.num_logits == min(allowed, 6)


def test_held_sequences_wait_for_their_tokens(batch: Batch) -> None:
    open_text(batch, 1, text(3), held=True)
    outcome = step(batch, 7)
    assert (outcome.request_ids.tolist(), outcome.token_ids.tolist()) == ([-1], [7])
    assert outcome.finished == []
    assert batch.token_ids(ONE) == text(3)
    plan_all(batch)
    assert batch.num_rows == 0
    batch.append(ONE, 50)
    plan_all(batch)
    assert planned(batch) == [(1, 3, 1, True)]


def test_closed_in_flight(batch: Batch) -> None:
    for number in (1, 2, 3):
        open_text(batch, number, text(3, number * 10))
    plan_all(batch)
    close(batch, 1)
    write(batch)
    close(batch, 3)
    assert batch.sequence_ids() == [2]
    assert batch.num_free_blocks == 5
    assert batch.samples()[0].tolist() == [1, 2, 3]
    outcome = batch.apply([5, 6, 7])
    assert outcome.request_ids.tolist() == [-1, 2, -1]
    assert outcome.token_ids.tolist() == [5, 6, 7]
    assert batch.num_free_blocks == 7
    assert batch.token_ids(TWO) == [20, 21, 22, 6]


def test_a_step_that_was_not_computed(batch: Batch) -> None:
    open_text(batch, 1, text(3))
    for in_flight in (False, True):
        plan_all(batch)
        if in_flight:
            write(batch)
        open_or_not = batch.num_free_blocks
        batch.abandon()
        assert (batch.num_computed(ONE), batch.num_free_blocks) == (0, open_or_not)
    plan_all(batch)
    assert planned(batch) == [(1, 0, 3, True)]


def test_calls_out_of_turn(batch: Batch) -> None:
    open_text(batch, 1, text(3))
    for early in (batch.abandon, lambda: write(batch), lambda: batch.apply([1])):
        with pytest.raises(AssertionError):
            early()
    with pytest.raises(AssertionError):
        batch.schedule(ONE, 1)
    plan_all(batch)
    with pytest.raises(AssertionError):
        batch.apply([1])
    with pytest.raises(AssertionError):
        batch.schedule(ONE, 1)
    with pytest.raises(AssertionError):
        batch.append(ONE, 1)
    write(batch)
    for late in (lambda: write(batch), lambda: plan_all(batch), lambda: open_text(batch, 2, [1])):
        with pytest.raises(AssertionError):
            late()
    for tokens in ([], [1, 2], [-2]):
        with pytest.raises(AssertionError):
            batch.apply(tokens)
    with pytest.raises(OverflowError):
        batch.apply([2**31])
    assert batch.apply([1]).token_ids.tolist() == [1]
    with pytest.raises(AssertionError):
        batch.append(ONE, 1)


def test_bad_arguments(batch: Batch) -> None:
    open_text(batch, 1, text(3))
    digests = batch.prefix_digests([1], b"")
    for place in (-1, 2):
        with pytest.raises(AssertionError):
            batch.open(TWO, [1], digests, rules(1), place, 0)
        with pytest.raises(AssertionError):
            batch.fork(ONE, TWO, rules(3), place)
    with pytest.raises(AssertionError):
        batch.open(ONE, [1], digests, rules(1), 0, 0)
    with pytest.raises(AssertionError):
        batch.open(TWO, [], batch.prefix_digests([], b""), rules(1), 0, 0)
    with pytest.raises(OverflowError):
        batch.open(TWO, [2**31], digests, rules(1), 0, 0)
    with pytest.raises(AssertionError):
        batch.plan(1, 0, 1)
    for call in (batch.close, batch.token_ids, batch.num_computed, batch.table):
        with pytest.raises(KeyError):
            call(THREE)
    with pytest.raises(KeyError):
        batch.fork(THREE, TWO, rules(1), 0)
    with pytest.raises(KeyError):
        batch.append(THREE, 1)
    assert batch.sequence_ids() == [1]
    assert batch.num_free_blocks == 7


@pytest.mark.parametrize("factory", TWINS, ids=["python", "native"])
@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0)])
def test_bad_sizes(factory: BatchFactory, num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="num_blocks: 0" if num_blocks == 0 else "block_size: 0"):
        factory(num_blocks, block_size, SHAPE.layout, True)


@pytest.mark.parametrize("factory", TWINS, ids=["python", "native"])
def test_facts_of_a_new_batch(factory: BatchFactory) -> None:
    batch = build(factory)
    assert (batch.num_blocks, batch.block_size, batch.num_free_blocks) == (8, 4, 8)
    assert (batch.num_cached_blocks, batch.num_unused_slots) == (0, 0)
    assert (batch.prefix_queries_total, batch.prefix_hits_total) == (0, 0)
    assert (batch.rows(), batch.copies(), batch.scores()) == ([], [], [])
