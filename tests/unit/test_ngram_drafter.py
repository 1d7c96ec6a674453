"""Prompt lookup: which occurrence guesses, and what it costs."""

import pytest

from triptych.engine_core.ngram_drafter import NgramDrafter

ONE, OTHER = 1, 2


def opened(
    prompt: list[int], output: list[int], *, shortest: int = 2, longest: int = 4
) -> NgramDrafter:
    drafter = NgramDrafter(shortest, longest)
    drafter.open(ONE, prompt, output, "")
    return drafter


def test_what_followed_before_is_guessed() -> None:
    drafter = opened([1, 2, 3, 4, 5, 6], [9, 2, 3])
    assert drafter.guess(ONE, 2) == [4, 5]


def test_the_longest_match_wins_over_a_later_one() -> None:
    drafter = opened([1, 2, 3, 70, 5, 2, 3, 80], [1, 2, 3])
    assert drafter.guess(ONE, 1) == [70]
    shorter = opened([1, 2, 3, 70, 5, 2, 3, 80], [1, 2, 3], longest=2)
    assert shorter.guess(ONE, 1) == [80], "of equals the later one"


def test_fewer_tokens_than_the_least_match_nothing() -> None:
    assert opened([1, 2, 3, 4], [9, 3]).guess(ONE, 4) == ()
    assert opened([1, 2, 3, 4], [9, 3], shortest=1).guess(ONE, 1) == [4]
    assert opened([], [3]).guess(ONE, 4) == ()
    assert opened([3], [3]).guess(ONE, 4) == ()


def test_output_counts_as_prompt_does() -> None:
    drafter = opened([7, 8], [1, 2, 3, 4])
    drafter.append([ONE, OTHER, ONE, ONE], [5, 1, 2, 3])
    assert drafter.guess(ONE, 3) == [4, 5, 2]


def test_repetition_is_guessed_to_go_on() -> None:
    assert opened([9, 1, 2, 3], [1, 2, 3, 1, 2]).guess(ONE, 7) == [3, 1, 2, 3, 1, 2, 3]
    assert opened([9], [5, 5, 5]).guess(ONE, 4) == [5, 5, 5, 5]


def test_a_long_prompt_is_indexed_over_several_steps() -> None:
    prompt = list(range(1000, 2000))
    drafter = NgramDrafter(2, 4, indexed_per_step=300)
    drafter.open(ONE, prompt, [1990, 1991], "")
    assert drafter.guess(ONE, 2) == ()
    assert drafter.guess(ONE, 2) == (), "the same step"
    assert drafter.num_indexed == 300
    for indexed in (600, 900, 1001):
        assert drafter.guess(ONE, 2) == ()
        drafter.append([], [])
        found = drafter.guess(ONE, 2)
        assert drafter.num_indexed == indexed
    assert found == [1992, 1993]


@pytest.mark.parametrize("per_step", [1, 9, 10, 50, 1000])
def test_no_position_is_lost_between_steps(per_step: int) -> None:
    drafter = NgramDrafter(2, 4, indexed_per_step=per_step)
    drafter.open(ONE, range(100), [], "")
    for _ in range(100):
        drafter.guess(ONE, 1)
        drafter.append([], [])
    assert drafter.num_indexed == 99
    for start in range(98):
        drafter.append([ONE, ONE], [start, start + 1])
        assert drafter.guess(ONE, 1) == [start + 2]
        drafter.append([ONE], [1000 + start])
        drafter.guess(ONE, 1)


def test_texts_share_what_may_be_indexed_at_once() -> None:
    drafter = NgramDrafter(1, 1, most_indexed=6)
    drafter.open(ONE, [1, 2, 3, 4], [1], "")
    drafter.open(OTHER, [1, 2, 3, 4], [3], "")
    assert drafter.guess(ONE, 1) == [2]
    assert drafter.guess(OTHER, 1) == (), "no room for so much of its text"
    drafter.close(ONE)
    assert drafter.guess(OTHER, 1) == [4]
    drafter.close(OTHER)
    assert (len(drafter), drafter.num_indexed) == (0, 0)


def test_sequences_that_are_not_open_are_passed_over() -> None:
    drafter = NgramDrafter(2, 4)
    drafter.append([ONE], [1])
    drafter.close(ONE)
    assert drafter.guess(ONE, 4) == ()
