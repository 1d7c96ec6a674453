"""How long guesses get, on scripted successes and failures."""

from itertools import pairwise

import pytest

from triptych.engine_core.batch import UNKNOWN_DRAFT
from triptych.engine_core.draft_lengths import (
    DEAR,
    FIRST_LENGTH,
    FIRST_PAUSE,
    FIRST_PAUSE_WHERE_DEAR,
    HIGHEST_PRICE,
    LONGEST_PAUSE,
    MOST_LOST,
    PRICE_PER_SEQUENCE,
    DraftLengths,
)
from triptych.engine_core.drafting import AdaptiveDrafter, ModelGuesser

ONE = 7


def opened(most_per_sequence: int = 16, most_per_step: int = 64) -> DraftLengths:
    lengths = DraftLengths(most_per_sequence, most_per_step)
    lengths.open(ONE)
    return lengths


def step(lengths: DraftLengths, accepted: int) -> int:
    """One step of sequence ONE, `accepted` of its guess taken at most; how much was guessed."""
    lengths.begin_step()
    drafted = lengths.most(ONE)
    lengths.proposed(drafted)
    lengths.verified(ONE, drafted, min(drafted, accepted))
    return drafted


def test_success_makes_guesses_longer_up_to_the_bound() -> None:
    lengths = opened(most_per_sequence=9)
    assert [step(lengths, 99) for _ in range(6)] == [FIRST_LENGTH, 6, 8, 9, 9, 9]


def test_the_first_guess_keeps_the_bound_too() -> None:
    assert step(opened(most_per_sequence=1), 0) == 1


def test_guesses_settle_one_above_what_is_taken() -> None:
    lengths = opened()
    assert [step(lengths, 3) for _ in range(5)][1:] == [4, 4, 4, 4]
    lengths = opened()
    for _ in range(10):
        step(lengths, 99)
    assert [step(lengths, 5), step(lengths, 5), step(lengths, 5)] == [16, 6, 6]


def pauses_of(drafted: list[int]) -> list[int]:
    """How many steps without a guess there are between two with one, where there are any."""
    guessed = [at for at, tokens in enumerate(drafted) if tokens]
    between = [later - at - 1 for at, later in pairwise(guessed)]
    return [pause for pause in between if pause]


def test_guesses_that_keep_failing_end_but_for_ever_rarer_probes() -> None:
    lengths = opened()
    drafted = [step(lengths, 0) for _ in range(400)]
    assert drafted[:5] == [4, 2, 1, 1, 1]
    before = drafted[: drafted.index(0)]
    assert sum(before) * PRICE_PER_SEQUENCE == pytest.approx(MOST_LOST, abs=PRICE_PER_SEQUENCE)
    assert set(drafted[len(before) :]) == {0, 1}
    pauses = pauses_of(drafted)
    assert pauses[:4] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE, LONGEST_PAUSE]
    assert set(pauses[4:]) == {LONGEST_PAUSE}


def test_a_probe_that_is_right_ends_the_pauses() -> None:
    lengths = opened()
    while step(lengths, 0):
        pass
    assert [step(lengths, 99) for _ in range(FIRST_PAUSE + 3)] == [0] * (FIRST_PAUSE - 1) + [
        1, 3, 5, 7,
    ]  # fmt: skip
    for _ in range(20):
        step(lengths, 99)
    drafted = [step(lengths, 0) for _ in range(60)]
    assert drafted[:4] == [16, 8, 4, 2], "what failed before a success is forgiven"
    assert pauses_of(drafted)[0] == FIRST_PAUSE, "and so is the length of the pauses"


def crowded(others: int) -> DraftLengths:
    lengths = DraftLengths(16, 256)
    for other in range(100, 100 + others):
        lengths.open(other)
    lengths.open(ONE)
    return lengths


def test_a_drafted_token_costs_more_the_more_sequences_there_are() -> None:
    assert [crowded(others).price for others in (0, 3, 7, 63)] == pytest.approx(
        [PRICE_PER_SEQUENCE, 4 * PRICE_PER_SEQUENCE, HIGHEST_PRICE, HIGHEST_PRICE]
    )


def test_guesses_that_cost_something_themselves_must_be_right_more_often() -> None:
    """One guess in five is right: enough if it was looked up, not if a model made it."""
    looked_up, made = DraftLengths(1, 8), DraftLengths(1, 8, guess_price=0.2)
    pauses = []
    for lengths in (looked_up, made):
        lengths.open(ONE)
        pauses.append([step(lengths, at % 5 == 4) for at in range(300)].count(0))
    assert pauses[0] == 0
    assert pauses[1] > 150


def test_where_many_run_the_first_guess_is_a_probe() -> None:
    assert crowded(7).price > DEAR > crowded(3).price
    assert step(crowded(3), 0) == FIRST_LENGTH
    lengths = crowded(7)
    drafted = [step(lengths, 0) for _ in range(FIRST_PAUSE_WHERE_DEAR + 2)]
    assert drafted == [1, *[0] * FIRST_PAUSE_WHERE_DEAR, 1]
    lengths = crowded(7)
    assert [step(lengths, 99) for _ in range(3)] == [1, 3, 5]


def test_what_fails_for_others_is_tried_later() -> None:
    lengths = crowded(7)
    for other in range(100, 107):
        lengths.verified(other, 1, 0)
    lengths.close(ONE)
    lengths.open(ONE)
    drafted = [step(lengths, 0) for _ in range(FIRST_PAUSE_WHERE_DEAR + 2)]
    assert drafted == [*[0] * FIRST_PAUSE_WHERE_DEAR, 1, 0]
    for _ in range(20):
        lengths.verified(100, 8, 8)
    lengths.close(ONE)
    lengths.open(ONE)
    assert step(lengths, 0) == 1, "their success counts too"


def test_guesses_that_are_right_too_rarely_to_pay_end() -> None:
    """Of 2 tokens the first is always right: that pays for one sequence, and not among many."""
    alone, among_many = opened(most_per_sequence=2), crowded(20)
    assert [step(alone, 1) for _ in range(100)].count(0) == 0
    among_many.verified(ONE, 1, 1)  # past the probe
    drafted = [step(among_many, 1) if at % 3 else step(among_many, 0) for at in range(400)]
    assert drafted.count(0) > 300


def test_what_was_not_computed_says_nothing() -> None:
    lengths = opened()
    for _ in range(20):
        lengths.verified(ONE, 0, 0)
    assert step(lengths, 0) == FIRST_LENGTH


def test_a_guess_that_was_cut_and_taken_does_not_make_the_next_one_shorter() -> None:
    lengths = opened()
    lengths.verified(ONE, 1, 1)
    assert step(lengths, 0) == FIRST_LENGTH


@pytest.mark.parametrize(("sequences", "each"), [(1, 8), (3, 4), (10, 1), (12, 1), (40, 1)])
def test_a_step_is_shared_out(sequences: int, each: int) -> None:
    lengths = DraftLengths(8, 10)
    for sequence in range(sequences):
        lengths.open(sequence)
        for _ in range(5):
            lengths.verified(sequence, 8, 8)
    for _ in range(3):
        lengths.begin_step()
        drafted = []
        for sequence in range(sequences):
            drafted.append(lengths.most(sequence))
            lengths.proposed(drafted[-1])
        assert drafted[0] == each
        assert max(drafted) == each
        assert sum(drafted) == min(10, each * sequences)


def test_what_one_does_not_guess_is_left_to_others() -> None:
    lengths = DraftLengths(8, 4)
    for sequence in (1, 2, 3):
        lengths.open(sequence)
    assert lengths.most(1) == 2
    lengths.proposed(0)
    assert lengths.most(2) == 2
    lengths.proposed(2)
    assert lengths.most(3) == 2


def test_closed_sequences_leave_nothing() -> None:
    lengths = opened()
    lengths.close(ONE)
    lengths.close(ONE)
    lengths.verified(ONE, 4, 4)
    assert (len(lengths), lengths.most(ONE)) == (0, 0)


def test_the_draft_model_guesses_as_many_tokens_as_are_worth_it() -> None:
    drafter = AdaptiveDrafter(ModelGuesser(), DraftLengths(8, 32))
    drafter.open(ONE, [1, 2], [3], "")
    assert drafter.propose(ONE) == [UNKNOWN_DRAFT] * FIRST_LENGTH
    drafter.verified(ONE, FIRST_LENGTH, FIRST_LENGTH)
    drafter.append([ONE] * 5, [1] * 5)
    assert drafter.propose(ONE) == [UNKNOWN_DRAFT] * 6
    drafter.close(ONE)
    assert list(drafter.propose(ONE)) == []
