"""Suffix decoding: earlier outputs guess for later requests of the same salt."""

from triptych.engine_core.output_store import LONGEST_MATCH, MOST_OCCURRENCES, PIECE_TOKENS
from triptych.engine_core.suffix_drafter import SuffixDrafter

ASKS = 1000


def said(drafter: SuffixDrafter, sequence: int, output: list[int], salt: str = "") -> None:
    """A sequence that ran and said this; its prompt is of no use to anybody."""
    drafter.open(sequence, [800, 801, 802], output[:1], salt)
    drafter.append([sequence] * (len(output) - 1), output[1:])
    drafter.close(sequence)


def guess(drafter: SuffixDrafter, output: list[int], most: int, salt: str = "") -> list[int]:
    drafter.append([], [])
    drafter.open(ASKS, [900], output, salt)
    found = list(drafter.guess(ASKS, most))
    drafter.close(ASKS)
    return found


def test_an_earlier_output_is_guessed() -> None:
    drafter = SuffixDrafter(2, 4)
    said(drafter, 1, [1, 2, 3, 4, 5, 6])
    assert guess(drafter, [9, 2, 3], 8) == [4, 5, 6]
    assert guess(drafter, [9, 3], 8) == []


def test_prompts_are_not_kept() -> None:
    drafter = SuffixDrafter(2, 4)
    drafter.open(1, [1, 2, 3, 4], [50, 51, 52], "")
    drafter.close(1)
    assert guess(drafter, [1, 2], 4) == []


def test_salts_never_meet() -> None:
    drafter = SuffixDrafter(2, 4)
    said(drafter, 1, [1, 2, 3, 4], "a")
    assert guess(drafter, [1, 2], 2, "b") == []
    assert guess(drafter, [1, 2], 2, "") == []
    assert guess(drafter, [1, 2], 2, "a") == [3, 4]


def test_most_of_the_matches_decide() -> None:
    drafter = SuffixDrafter(2, 4)
    for sequence, output in enumerate([[5, 1, 2, 70], [6, 1, 2, 80, 81], [7, 1, 2, 80, 82]]):
        said(drafter, sequence, output)
    assert guess(drafter, [1, 2], 2) == [80, 82], "of equals the last"


def test_a_longer_match_wins_over_many_short_ones() -> None:
    drafter = SuffixDrafter(2, 4)
    said(drafter, 0, [4, 5, 1, 2, 70])
    for sequence in range(1, 4):
        said(drafter, sequence, [30 + sequence, 1, 2, 80])
    assert guess(drafter, [4, 5, 1, 2], 1) == [70]


def test_a_guess_ends_where_outputs_part() -> None:
    drafter = SuffixDrafter(2, 4)
    for sequence in range(5):
        said(drafter, sequence, [1, 2, 3, 40 + sequence, 6])
    assert guess(drafter, [1, 2], 4) == [3], "each continuation is one of five"


def test_own_text_goes_before_as_long_a_match_elsewhere() -> None:
    drafter = SuffixDrafter(2, 4)
    said(drafter, 1, [1, 2, 70, 71])
    drafter.open(2, [1, 2, 60, 61], [5, 1, 2], "")
    assert drafter.guess(2, 2) == [60, 61]
    said(drafter, 3, [5, 1, 2, 80, 81])
    drafter.append([], [])
    assert drafter.guess(2, 2) == [80, 81], "a longer one goes before it"


def test_a_resumed_sequence_is_kept_once() -> None:
    drafter = SuffixDrafter(2, 4)
    first = list(range(100))
    drafter.open(1, [800], [], "")
    drafter.append([1] * 100, first)
    drafter.close(1)  # preempted
    drafter.open(1, [800], first, "")
    drafter.append([1, 1], [300, 301])
    drafter.close(1)
    drafter.open(1, [800], [*first, 300, 301], "")
    drafter.close(1)
    assert drafter.store.num_waiting == 100 + LONGEST_MATCH + 2
    assert guess(drafter, [98, 99], 2) == [300, 301], "across the preemption"


def test_the_store_is_bounded_and_forgets_what_was_used_longest_ago() -> None:
    drafter = SuffixDrafter(2, 4, stored_tokens=20)
    for sequence in range(4):
        said(drafter, sequence, [10 * sequence + i for i in range(5)])
    assert guess(drafter, [0, 1], 1) == [2], "used: no longer the oldest"
    assert drafter.store.num_tokens == 20
    said(drafter, 5, [90, 91, 92, 93, 94])
    assert guess(drafter, [90, 91], 1) == [92]
    assert drafter.store.num_tokens == 20
    assert guess(drafter, [0, 1], 1) == [2]
    assert guess(drafter, [10, 11], 1) == []
    assert guess(drafter, [20, 21], 1) == [22]


def test_what_waits_to_be_indexed_is_bounded() -> None:
    drafter = SuffixDrafter(2, 4, stored_tokens=1000)
    for sequence in range(10):
        said(drafter, sequence, list(range(300)))
    assert drafter.store.num_waiting <= 1000
    said(drafter, 11, list(range(5000)))
    assert drafter.store.num_waiting <= 1000


def test_a_step_indexes_a_bounded_part_of_what_ended() -> None:
    drafter = SuffixDrafter(2, 4)
    said(drafter, 1, list(range(10 * PIECE_TOKENS)))
    drafter.open(2, [1], [2], "")
    for step in range(1, 5):
        drafter.append([2], [3])
        drafter.guess(2, 1)
        drafter.guess(2, 1)
        assert drafter.store.num_tokens == step * PIECE_TOKENS


def test_forgotten_outputs_leave_no_entry() -> None:
    drafter = SuffixDrafter(2, 4, stored_tokens=50)
    for sequence in range(30):
        said(drafter, sequence, [7, 7, 7, *range(10), 7, 7, 7], f"salt {sequence}")
        guess(drafter, [1], 1)
        assert drafter.store.num_tokens <= 50
        assert drafter.store.num_grams <= 50


def test_of_one_gram_the_last_occurrences_are_known() -> None:
    drafter = SuffixDrafter(2, 4)
    said(drafter, 0, [8, 1, 2, 70])
    assert guess(drafter, [8, 1, 2], 1) == [70]
    for sequence in range(MOST_OCCURRENCES):
        said(drafter, 1 + sequence, [9, 1, 2, 80])
    assert guess(drafter, [8, 1, 2], 1) == [80]


def test_an_output_may_outlive_those_that_took_its_place_in_the_index() -> None:
    drafter = SuffixDrafter(2, 4, stored_tokens=4 + 3 * MOST_OCCURRENCES)
    said(drafter, 0, [1, 2, 3, 4])
    for sequence in range(MOST_OCCURRENCES):
        said(drafter, 1 + sequence, [1, 2, 9])
    assert guess(drafter, [2, 3], 1) == [4], "used: the last to be forgotten"
    for sequence in range(MOST_OCCURRENCES + 1):
        said(drafter, 20 + sequence, [50 + sequence, 70, 71, 72])
        guess(drafter, [0], 1)
        assert drafter.store.num_tokens <= 4 + 3 * MOST_OCCURRENCES
    assert guess(drafter, [2, 3], 1) == []


def test_closed_sequences_leave_nothing() -> None:
    drafter = SuffixDrafter(2, 4)
    said(drafter, 1, [1, 2, 3, 4])
    drafter.close(1)
    drafter.close(99)
    drafter.append([1], [5])
    assert drafter.guess(1, 4) == ()
    assert (len(drafter), drafter.num_indexed) == (0, 0)
