"""Masks of the step in flight, what is taken, and how a grammar that fails ends its sequence."""

import numpy as np
import pytest
from llguidance import LLExecutor

from grammar_sources import EOS, OTHER_EOS, SMALL_VOCABULARY, SmallGrammars, regex, schema
from small_grammars import AA, AB, ABC, BA, ENDS, A, B, C, allowed, grammars, ids_of, params
from triptych.engine_core.errors import InvalidRequest
from triptych.services.scheduler.grammar_state import (
    LONGEST_FORCED,
)
from triptych.services.scheduler.running_grammars import LAST, RunningGrammars


def test_a_mask_has_what_may_follow() -> None:
    running = grammars()
    running.open(1, params(regex("(ab)*c")), [])
    assert allowed(running) == {A, AB, ABC, C}
    assert not running.take(1, A)
    assert allowed(running) == {B, BA}
    assert running.take(1, B) is False
    assert running.take(1, C) is True
    assert allowed(running) == set(ENDS)


def test_prepared_masks_are_those_computed_one_by_one() -> None:
    drafts = [A, B, AB, C]
    prepared, lazy = grammars(), grammars()
    for running in (prepared, lazy):
        running.open(1, params(regex("(ab)*c(c|d)*")), [])
    prepared.prepare([1] * 5, [*drafts, LAST])
    assert sorted(prepared._prepared) == [0, 1, 2, 3, 4]
    for sample, draft in enumerate([*drafts, 0]):
        found = prepared._prepared[sample].mask
        mask = prepared.mask(sample, 1)
        assert mask is found, "what was prepared is used"
        assert ids_of(mask.words) == allowed(lazy)
        if sample < 4:
            prepared.take(1, draft)
            lazy.take(1, draft)


@pytest.mark.parametrize("drafts", [[A, B, AB, C, C], [C, C], [A, A, B], [A, B, EOS], [EOS], [C]])
def test_masks_behind_drafts_are_those_of_llguidance(drafts: list[int]) -> None:
    source = SmallGrammars()
    grammar = regex("(ab)*(c|d)*")
    running = RunningGrammars(source)
    running.open(1, params(grammar), [])
    running.prepare([1] * (len(drafts) + 1), [*drafts, LAST])
    words = -(-SMALL_VOCABULARY // 32)
    theirs = np.zeros((len(drafts) + 1, words), np.uint32)
    LLExecutor(1).unsafe_compute_mask_ptr_with_draft_token(
        [(source.matcher(grammar), 0, drafts)], theirs.ctypes.data, 4 * words, len(theirs)
    )
    assert running._prepared
    for sample, found in running._prepared.items():
        assert ids_of(found.mask.words) == ids_of(theirs[sample])
    # It has masks behind an end of sequence too, where nothing is drawn.
    assert len(running._prepared) >= int(theirs.any(1).sum()) - 1


def test_masks_of_other_drafts_are_not_used() -> None:
    running = grammars()
    running.open(1, params(regex("(ab|ba)c|bbd")), [])
    running.prepare([1, 1, 1], [A, B, LAST])
    running.take(1, B)
    assert allowed(running, sample=1) == {A, B}
    running.take(1, B)
    assert allowed(running, sample=2) == {ord("d")}
    running.close(1)
    running.open(1, params(regex("x")), [])
    assert allowed(running) == {ord("x")}, "nor those of one that had the id before"


def test_guesses_that_do_not_match_change_nothing() -> None:
    running = grammars()
    running.open(1, params(regex("abc")), [])
    assert running.legal(1, [A, B, B]) == [A, B]
    assert running.legal(1, [SMALL_VOCABULARY]) == []
    assert running.legal(1, [-1, A]) == []
    assert running.legal(1, [A, 2**31 - 1]) == [A]
    for drafts in ([B, B], [A, SMALL_VOCABULARY + 7], [-1, -1], [2**31 - 1]):
        running.prepare([1] * (len(drafts) + 1), [*drafts, LAST])
        assert running.error(1) is None
    assert running.forced(1) == [ABC]
    assert not running.take(1, A)
    assert running.error(1) is None


def test_forced_text_is_bounded_and_cut_between_characters() -> None:
    running = grammars()
    running.open(1, params(schema({"const": "ab" * 400})), [])
    assert len(running.forced(1)) == LONGEST_FORCED
    before = "x" * (8 * LONGEST_FORCED - 1)
    texts: list[bytes] = []

    class Heard(SmallGrammars):
        def greedy_tokens(self, text: bytes) -> list[int]:
            texts.append(text)
            return super().greedy_tokens(text)

    running = RunningGrammars(Heard())
    running.open(1, params(regex(before + "\u00e9" * 40)), [])
    assert running.forced(1) == [ord("x")] * LONGEST_FORCED
    assert texts == [before.encode()]


def test_forced_text_is_searched_once_and_said_token_by_token() -> None:
    """However the tokens cut it, and also where one goes on behind it."""
    running = grammars()
    running.open(1, params(regex("(abc){4}ab(c|[x-z]{2})")), [])
    state = running._states[1]
    matcher = state.matcher
    assert matcher is not None
    text = b"abcabcabcabcab"
    for token in (A, ord("b"), ord("c"), ABC, ord("a")):
        expected = matcher.compute_ff_bytes()
        assert state.forced(99) == expected
        assert text.endswith(expected)
        assert state.forced(3) == expected[:3]
        state.take(token)
    for token in (ord("b"), ord("c"), ABC, ABC):  # the last one's c is a choice
        assert state.forced(99) == matcher.compute_ff_bytes()
        state.take(token)
        assert state.error is None
    assert state.forced(99) == matcher.compute_ff_bytes() == b""


def test_as_much_forced_text_is_guessed_as_proves_right() -> None:
    running = grammars()
    running.open(1, params(regex("x{100}")), [])
    guessed = []
    for accepted in (32, 3, 4, 8, 10, 0, 0, 1):
        guessed.append(len(running.forced(1)))
        running.verified(1, guessed[-1], accepted)
    assert guessed == [32, 32, 4, 8, 16, 11, 1, 1]
    assert len(running.forced(1)) == 2


def test_the_vocabulary_may_come_after_the_grammars() -> None:
    source = SmallGrammars()
    size, source.vocabulary_size = source.vocabulary_size, 0
    running = RunningGrammars(source)
    source.vocabulary_size = size
    running.open(1, params(regex("a")), [])
    assert allowed(running) == {A}


def test_stop_ids_are_withheld_until_min_tokens() -> None:
    running = grammars()
    running.open(1, params(regex("a*"), min_tokens=2, stop_token_ids=(*ENDS, AA)), [])
    assert allowed(running) == {A}
    running.take(1, A)
    mask = running.mask(0, 1)
    assert mask is not None
    assert ids_of(mask.words) == {A}
    assert mask.release()
    assert ids_of(mask.words) == {A, AA, *ENDS}
    assert not mask.release()
    running.take(1, A)
    assert allowed(running) == {A, AA, *ENDS}


def test_ends_that_are_ignored_are_withheld_always() -> None:
    running = grammars()
    running.open(1, params(regex("a*"), stop_token_ids=(OTHER_EOS,), min_tokens=1), [])
    assert allowed(running) == {A, AA}
    running.take(1, A)
    assert allowed(running) == {A, AA, OTHER_EOS}
    running.prepare([1] * 3, [A, A, LAST])
    assert ids_of(running._prepared[2].mask.words) == {A, AA, OTHER_EOS}


@pytest.mark.parametrize("end", ENDS)
def test_an_end_of_sequence_completes(end: int) -> None:
    running = grammars()
    running.open(1, params(regex("a*")), [])
    running.take(1, A)
    assert running.take(1, end)
    assert running.error(1) is None


def test_tokens_that_were_taken_are_not_taken_again() -> None:
    running = grammars()
    running.open(1, params(regex("abc*")), [])
    running.take(1, A)
    running.take(1, B)
    running.append([1, 9, 1], [A, 0, B])
    running.append([1], [C])  # drawn by somebody else
    assert running._states[1].output_ids == [A, B, C]
    assert running._states[1].ahead == 0


def test_a_token_that_does_not_match_ends_the_sequence() -> None:
    running = grammars()
    running.open(1, params(regex("abc")), [])
    running.open(2, params(regex("abc")), [])
    assert not running.take(1, B)
    error = running.error(1)
    assert isinstance(error, InvalidRequest)
    assert error.field == "structured_output"
    assert "after 0 output tokens" in error.description
    assert "\n" not in error.description
    assert "<state>" not in error.description
    assert running.mask(0, 1) is None
    running.prepare([1, 1, 2], [A, LAST, LAST])
    assert running.mask(0, 1) is None
    assert running.forced(1) == running.legal(1, [A]) == []
    assert not running.take(1, A)
    assert running.error(2) is None
    assert allowed(running, 2, 2) == {ABC}


@pytest.mark.parametrize("output", [[C], [A, SMALL_VOCABULARY], [A, -1], [ABC, EOS, EOS, A]])
def test_output_that_cannot_have_been_ends_the_sequence(output: list[int]) -> None:
    running = grammars()
    running.open(1, params(regex("abc")), output)
    assert isinstance(running.error(1), InvalidRequest)
    assert running.mask(0, 1) is None


def test_a_grammar_that_is_gone_ends_the_sequence() -> None:
    source = SmallGrammars()
    running = RunningGrammars(source)
    grammar = regex("a*")
    running.open(1, params(grammar), [])
    source.refused.add(grammar)
    running.open(2, params(grammar), [A])
    assert str(running.error(2)) == "structured_output: the grammar is gone"
    assert running.mask(1, 2) is None
    assert running.error(1) is None
    running.close(1)
    running.close(2)
    assert not len(running)


def test_what_can_never_match_shows_at_the_first_mask() -> None:
    running = grammars()
    running.open(1, params(schema({"$ref": "#"})), [])
    running.prepare([1], [LAST])
    assert running.mask(0, 1) is None
    error = running.error(1)
    assert isinstance(error, InvalidRequest)
    assert "NoExtensionBias" in error.description


def test_masks_memory_grows_with_the_step_and_is_used_again() -> None:
    running = grammars()
    for sequence_id in range(40):
        running.open(sequence_id, params(regex(f"a{{{sequence_id % 4}}}b")), [])
    ids = list(range(40))
    for _ in range(3):
        running.prepare(ids, [LAST] * 40)
        assert len(running._prepared) == 40
        for sample in ids:
            assert allowed(running, sample, sample) == [{B}, {AB}, {AA}, {AA}][sample % 4]
        running.forget_masks()
        assert not running._prepared
    assert len(running._rows) <= 128
