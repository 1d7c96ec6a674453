"""What is found in the prefix cache, and what is not. Blocks are of 4 tokens, the pool has 8."""

import pytest

from batch_calls import (
    SHAPE,
    build,
    close,
    compute_and_close,
    fork,
    match,
    open_text,
    plan_all,
    rules,
    step,
    text,
    write,
)
from batch_model import BatchFactory, BatchShape
from batch_twins import TWINS
from triptych.engine_core.batch import FINISH_NOT_FINITE, NOT_FINITE, Batch
from triptych.engine_core.ids import SequenceId


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
@pytest.mark.parametrize("change", [-1, 0, 1])
@pytest.mark.parametrize("choices", [1, 2])
def test_the_same_prompt_again(batch: Batch, num_blocks: int, change: int, choices: int) -> None:
    """R61 (vLLM 3193, 3239, 11186; nano-vllm 210): a prompt of whole blocks, one less, one more."""
    prompt = text(4 * num_blocks + change)
    compute_and_close(batch, 1, prompt)
    expected = max(0, len(prompt) - 1)
    assert match(batch, prompt) == (expected, 0)
    assert open_text(batch, 2, prompt, max_tokens=3) == expected
    plan_all(batch)
    assert [tuple(row) for row in batch.rows()] == [(2, expected, 1, True)]
    if choices == 2:
        fork(batch, 2, 3)
    write(batch)
    assert batch.apply([50, 51][:choices]).finishes.tolist() == [0] * choices
    step(batch)
    assert batch.token_ids(SequenceId(2)) == [*prompt, 50, 9]
    close(batch, *batch.sequence_ids())
    assert batch.num_free_blocks == SHAPE.num_blocks


def test_the_last_block_of_a_prompt_is_used_by_copy(batch: Batch) -> None:
    compute_and_close(batch, 1, text(8))
    assert open_text(batch, 2, text(8)) == 7
    assert batch.table(SequenceId(2)) == [0, 2]
    plan_all(batch)
    assert batch.copies() == [(1, 2)]


def test_a_part_of_a_block_is_used_by_copy(batch: Batch) -> None:
    compute_and_close(batch, 1, text(7))
    assert batch.num_cached_blocks == 2
    other = [*text(6), 77, 78, 79]
    assert match(batch, other) == (6, 0)
    assert open_text(batch, 2, other) == 6
    assert batch.copies() == [(1, 2)]
    assert (batch.prefix_queries_total, batch.prefix_hits_total) == (7 + 9, 6)


def test_the_child_that_shares_most_is_copied(batch: Batch) -> None:
    compute_and_close(batch, 1, [*text(4), 10, 20, 30])
    compute_and_close(batch, 2, [*text(4), 10, 21, 31])
    compute_and_close(batch, 3, [*text(4), 11])
    assert match(batch, [*text(4), 10, 20, 31, 40]) == (6, 0)
    assert match(batch, [*text(4), 10, 21, 31, 40]) == (7, 0)
    assert match(batch, [*text(4), 11, 20]) == (5, 0)
    # Among equals, the lowest block.
    first = batch.num_free_blocks
    open_text(batch, 4, [*text(4), 10, 22, 50])
    assert batch.copies() == [(1, batch.table(SequenceId(4))[1])]
    assert batch.num_free_blocks == first - 3


def test_a_part_that_another_child_begins_with_is_not_kept(batch: Batch) -> None:
    compute_and_close(batch, 1, text(7))
    compute_and_close(batch, 2, text(6))
    assert batch.num_cached_blocks == 2
    compute_and_close(batch, 3, [*text(6), 50])
    assert batch.num_cached_blocks == 3


def test_another_salt_finds_nothing(batch: Batch) -> None:
    compute_and_close(batch, 1, text(9), b"a")
    assert match(batch, text(9), b"b") == (0, 0)
    assert match(batch, text(9), b"a") == (8, 0)
    assert match(batch, text(3), b"b") == (0, 0)
    assert match(batch, text(3), b"a") == (2, 0)


def test_a_block_after_other_blocks_is_another_one(batch: Batch) -> None:
    compute_and_close(batch, 1, [*text(4), *text(4, 10)])
    assert match(batch, [*text(4, 10), 5]) == (0, 0)
    assert match(batch, [*text(4, 20), *text(4, 10), 5]) == (0, 0)


def test_output_is_found_as_well(batch: Batch) -> None:
    open_text(batch, 1, text(3))
    for token in (40, 41, 42, 43, 44):
        step(batch, token)
    close(batch, 1)
    assert match(batch, [*text(3), 40, 41, 42, 43, 44]) == (7, 0)


def test_only_what_was_applied_is_found(batch: Batch) -> None:
    """R66 (vLLM 29387, 7414, 7845): many identical prompts at once, the first still computing."""
    prompt = text(12)
    open_text(batch, 1, prompt)
    for phase in ("opened", "planned", "written"):
        assert match(batch, prompt) == (0, 11), phase
        if phase == "opened":
            assert batch.plan(8, 8, 8)
        if phase == "planned":
            assert open_text(batch, 2, prompt) == 0, "computed by both: nobody reads the unwritten"
            write(batch)
    batch.apply([])
    assert match(batch, prompt) == (8, 3)
    assert open_text(batch, 3, prompt) == 8
    close(batch, 1, 2)
    assert match(batch, prompt) == (8, 3), "the third has the last block still to compute"
    close(batch, 3)
    assert match(batch, prompt) == (8, 0)


def test_what_was_abandoned_is_not_found(batch: Batch) -> None:
    open_text(batch, 1, text(8))
    plan_all(batch)
    write(batch)
    batch.abandon()
    assert match(batch, text(8)) == (0, 7)
    close(batch, 1)
    assert match(batch, text(8)) == (0, 0)
    assert batch.num_cached_blocks == 0


def test_what_was_closed_in_flight_and_computed_is_found(batch: Batch) -> None:
    open_text(batch, 1, text(7))
    plan_all(batch)
    write(batch)
    close(batch, 1)
    assert match(batch, text(7)) == (0, 0)
    assert batch.num_free_blocks == 6
    batch.apply([5])
    assert match(batch, text(8)) == (7, 0)
    assert batch.num_free_blocks == 8


def test_pending_counts_blocks_that_follow_what_is_computed(batch: Batch) -> None:
    open_text(batch, 1, text(14))
    assert match(batch, text(20)) == (0, 12)
    assert match(batch, text(12)) == (0, 11), "all but the last token"
    assert match(batch, [*text(8), 99, 9, 9, 9]) == (0, 8)
    assert batch.plan(6, 6, 6)
    write(batch)
    batch.apply([])
    assert match(batch, text(20)) == (4, 8)
    open_text(batch, 2, text(14), cached=False)
    close(batch, 1)
    # The part of the second block that was computed stays.
    assert match(batch, text(20)) == (6, 0)


def test_a_token_that_fills_a_block_makes_it_pending(batch: Batch) -> None:
    open_text(batch, 1, text(3))
    step(batch, 3)
    assert match(batch, text(6)) == (0, 4)
    step(batch, 4)
    assert match(batch, text(6)) == (4, 0)


def test_the_first_block_of_a_text_stays(batch: Batch) -> None:
    open_text(batch, 1, text(4))
    open_text(batch, 2, text(4))
    step(batch)
    close(batch, 1)
    assert batch.num_cached_blocks == 1
    open_text(batch, 3, text(5))
    assert batch.table(SequenceId(3))[0] == 0
    close(batch, 2, 3)


def test_the_longest_unused_goes_first_and_ends_before_beginnings(batch: Batch) -> None:
    compute_and_close(batch, 1, text(8, 100))  # blocks 0, 1
    compute_and_close(batch, 2, text(8, 200))  # blocks 2, 3
    assert match(batch, text(9, 100)) == (8, 0)
    open_text(batch, 3, text(9, 100))  # used again: later in line
    close(batch, 3)
    open_text(batch, 4, text(4 * 5, 300))  # 4 blocks without text, then one more
    assert match(batch, text(9, 200)) == (4, 0), "the end of the older text went"
    assert match(batch, text(9, 100)) == (8, 0)
    close(batch, 4)


def test_blocks_without_text_are_taken_before_those_with(batch: Batch) -> None:
    compute_and_close(batch, 1, text(8))
    open_text(batch, 2, text(8, 50), cached=False)
    table = batch.table(SequenceId(2))
    step(batch)
    close(batch, 2)
    open_text(batch, 3, text(8, 60), cached=False)
    assert batch.table(SequenceId(3)) == table
    assert match(batch, text(9)) == (8, 0)


def test_one_that_scores_its_prompt_or_is_not_cached_finds_nothing(batch: Batch) -> None:
    compute_and_close(batch, 1, text(9))
    assert open_text(batch, 2, text(9), cached=False) == 0
    assert open_text(batch, 3, text(9), score_prompt=True) == 0
    assert batch.prefix_queries_total == 9
    step(batch)
    close(batch, 2, 3)


def test_an_uncached_sequence_leaves_nothing(batch: Batch) -> None:
    open_text(batch, 1, text(9), cached=False)
    step(batch)
    close(batch, 1)
    assert batch.num_cached_blocks == 0
    assert match(batch, text(9)) == (0, 0)


def test_without_room_nothing_is_taken(batch: Batch) -> None:
    compute_and_close(batch, 1, text(8))
    assert open_text(batch, 2, text(9), spare=6) == -1
    assert (batch.num_free_blocks, batch.prefix_queries_total) == (8, 8)
    assert batch.sequence_ids() == []
    assert open_text(batch, 2, text(9), spare=5) == 8
    assert batch.num_free_blocks == 5
    assert open_text(batch, 3, text(9), spare=4) == 8, "what is held already costs nothing"
    assert batch.num_free_blocks == 4


def test_the_copied_part_is_done_without_where_only_that_fits(batch: Batch) -> None:
    """The source takes a block more: a prompt that fills the pool could never run again."""
    compute_and_close(batch, 1, text(32))
    assert match(batch, text(32)) == (31, 0)
    assert open_text(batch, 2, text(32)) == 28
    assert batch.copies() == []
    step(batch)
    close(batch, 2)


def test_a_held_source_costs_nothing(batch: Batch) -> None:
    open_text(batch, 1, text(32))
    step(batch)
    assert open_text(batch, 2, [*text(3), 99]) == -1
    close(batch, 1)
    compute_and_close(batch, 1, text(28))
    open_text(batch, 2, text(25))
    assert batch.num_free_blocks == 1
    assert open_text(batch, 3, [*text(3), 99]) == 3
    step(batch)


def test_the_source_of_a_copy_is_not_given_out_before_the_step(batch: Batch) -> None:
    compute_and_close(batch, 1, text(3))
    open_text(batch, 2, text(3))
    ((source, target),) = batch.copies()
    assert batch.num_free_blocks == 6
    open_text(batch, 3, text(24, 100))
    assert source not in batch.table(SequenceId(3))
    assert open_text(batch, 4, text(1, 200)) == -1
    step(batch)
    assert match(batch, text(3)) == (2, 0)
    assert target == batch.table(SequenceId(2))[0]


def test_a_copy_that_nobody_wants_any_more_is_dropped(batch: Batch) -> None:
    compute_and_close(batch, 1, text(3))
    open_text(batch, 2, text(3))
    close(batch, 2)
    assert batch.copies() == []
    assert batch.num_free_blocks == 8
    assert match(batch, text(3)) == (2, 0)


def test_forgotten_is_what_was_computed_and_what_rests_on_it(batch: Batch) -> None:
    compute_and_close(batch, 1, text(8))
    open_text(batch, 2, text(10, 50))
    step(batch)
    batch.forget_cache()
    batch.check()
    assert (match(batch, text(8)), match(batch, text(10, 50))) == ((0, 0), (0, 0))
    fork(batch, 2, 3)
    for _ in range(4):
        step(batch)
    close(batch, 2, 3)
    assert batch.num_cached_blocks == 0
    compute_and_close(batch, 4, text(8))
    assert match(batch, text(8)) == (7, 0)


def test_what_is_not_finite_is_found_by_nobody(batch: Batch) -> None:
    """Its keys and values may be NaN as well, and would break whoever shares the prefix."""
    open_text(batch, 1, text(10))
    assert batch.plan(8, 8, 8)
    write(batch)
    batch.apply([])
    assert match(batch, text(10)) == (8, 0)
    outcome = step(batch, NOT_FINITE)
    assert outcome.finishes.tolist() == [FINISH_NOT_FINITE]
    assert match(batch, text(10)) == (0, 0)
    assert (batch.num_cached_blocks, batch.num_free_blocks) == (0, 8)


def test_a_block_whose_copy_is_due_is_not_kept(batch: Batch) -> None:
    """It does not hold its tokens yet."""
    open_text(batch, 1, text(6), held=True)
    step(batch)
    fork(batch, 1, 2, held=True)
    batch.append(SequenceId(1), 10)
    plan_all(batch)
    assert len(batch.copies()) == 1
    batch.abandon()
    close(batch, 1)
    assert batch.copies() == []
    assert match(batch, text(7)) == (4, 0)
    close(batch, 2)
    assert match(batch, text(7)) == (6, 0)


@pytest.mark.parametrize("factory", TWINS, ids=["python", "native"])
def test_without_prefix_caching(factory: BatchFactory) -> None:
    batch = build(factory, BatchShape(num_blocks=8, block_size=4, prefix_caching=False))
    assert batch.prefix_digests(text(9), b"") == b""
    assert batch.match(text(9), b"anything") == (0, 0)
    for number in (1, 2):
        assert open_text(batch, number, text(9)) == 0
        step(batch, shape=BatchShape(num_blocks=8, block_size=4))
        close(batch, number)
    assert (batch.num_cached_blocks, batch.prefix_queries_total) == (0, 0)


def test_digests_must_be_those_of_the_text(batch: Batch) -> None:
    digests = batch.prefix_digests(text(9), b"")
    assert len(digests) == 16 * 3
    for wrong in (b"", digests[:-1], digests + bytes(16)):
        with pytest.raises(ValueError, match="digests"):
            batch.match(text(9), wrong)
        with pytest.raises(ValueError, match="digests"):
            batch.open(SequenceId(1), text(9), wrong, rules(9), 0, 0)
    assert batch.open(SequenceId(1), text(9), b"", rules(9, cached=False), 0, 0) == 0
