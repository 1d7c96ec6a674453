"""Grammars that meet a limit of the library, or of time: who ends, and who does not."""

import time
from collections.abc import Sequence

import pytest
from llguidance import LLMatcher, LLParserLimits

from grammar_sources import SmallGrammars, lark, regex
from small_grammars import A, B, allowed, grammars, params
from triptych.engine_core.errors import InvalidRequest
from triptych.services.scheduler.grammar_state import (
    MEAN_SECONDS,
    MOST_SECONDS,
    GrammarState,
)
from triptych.services.scheduler.running_grammars import LAST, RunningGrammars

AMBIGUOUS = lark('start: x\nx: x x | "a" | "ab" x | "b" y\ny: x y | "c"\n')


def test_a_limit_that_only_guesses_exceed_ends_nobody() -> None:
    tokens = [A] * 6
    limits = LLParserLimits(max_items_in_row=_items_that_fail_at(tokens, 4))
    running = grammars(limits)
    running.open(1, params(AMBIGUOUS), [])
    running.prepare([1] * (len(tokens) + 1), [*tokens, LAST])
    running.legal(1, tokens)
    assert running.error(1) is None
    assert 1 <= len(running._prepared) <= 6
    for sample, token in enumerate(tokens):
        if running.mask(sample, 1) is None:
            break
        running.take(1, token)
    error = running.error(1)
    assert isinstance(error, InvalidRequest), "drawn, they do end it"
    assert "items" in error.description


def _items_that_fail_at(tokens: Sequence[int], least: int) -> int:
    """A limit under which a matcher takes `least` tokens or more, but not all of them."""
    for items in range(8, 200):
        running = grammars(LLParserLimits(max_items_in_row=items))
        running.open(1, params(AMBIGUOUS), [])
        taken = 0
        while taken < len(tokens) and running.mask(0, 1) is not None:
            running.take(1, tokens[taken])
            taken += running.error(1) is None
        if least <= taken < len(tokens):
            return items
    raise AssertionError("no limit lies between")


WEARING = regex("(a|b)*a(a|b){0,12}c")


def test_a_lexer_that_others_used_up_is_compiled_anew() -> None:
    """Matchers of one grammar share its lexer's states: here of 64, which a few texts need."""
    source = SmallGrammars(LLParserLimits(max_lexer_states=64))
    shared = source.matcher(WEARING)
    tokens = [A, B, A, A, B, A, B, B]

    class Shared(SmallGrammars):
        limits = source.limits

        def matcher(self, grammar: str) -> LLMatcher:
            return shared.deep_copy() if grammar == WEARING else super().matcher(grammar)

        def renewed(self, grammar: str) -> LLMatcher:
            self.num_renewed += 1
            return source.matcher(grammar)

    mine = Shared()
    alone, running = RunningGrammars(SmallGrammars()), RunningGrammars(mine)
    for each in (alone, running):
        each.open(1, params(WEARING), [])
    _use_up(shared)
    for token in tokens:
        assert allowed(running) == allowed(alone)
        for each in (alone, running):
            each.take(1, token)
            assert each.error(1) is None
    assert mine.num_renewed == 1
    running.open(2, params(WEARING), tokens)
    assert allowed(running, 0, 2) == allowed(alone)
    assert mine.num_renewed == 2


def _use_up(matcher: LLMatcher) -> None:
    for number in range(64):
        each = matcher.deep_copy()
        for bit in range(12):
            each.compute_bitmask()
            each.consume_token((A, B)[number >> bit & 1])
            if each.is_error():
                return
    raise AssertionError("it has states left")


def test_a_lexer_that_a_sequence_uses_up_by_itself_ends_it() -> None:
    running = RunningGrammars(SmallGrammars(LLParserLimits(max_lexer_states=8)))
    running.open(1, params(WEARING), [])
    assert running.mask(0, 1) is None
    error = running.error(1)
    assert isinstance(error, InvalidRequest)
    assert "too many states" in error.description


class Clock:
    """A processor's time, of which every call of a matcher takes `each`."""

    def __init__(self, each: float) -> None:
        self.each = each
        self.now = 0.0

    def __call__(self) -> float:
        self.now += self.each
        return self.now


def test_a_grammar_of_which_a_token_takes_too_long_ends_the_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running = grammars()
    running.open(1, params(regex("a*")), [])
    running.open(2, params(regex("a*")), [])
    running.take(1, A)
    monkeypatch.setattr(time, "thread_time", Clock(1.01 * MOST_SECONDS))
    assert running.mask(0, 1) is None
    assert "a token took 0.015 s" in str(running.error(1))
    assert not running.take(2, A)
    assert "too ambiguous" in str(running.error(2))


@pytest.mark.parametrize("share", [0.4, 0.6])
def test_a_grammar_whose_tokens_take_long_for_ever_ends_the_sequence(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few may be slow; a mask and a token taken in, each this share of the mean, for ever."""
    running = grammars()
    running.open(1, params(regex("a*")), [])
    clock = Clock(MOST_SECONDS / 5)
    monkeypatch.setattr(time, "thread_time", clock)
    assert running.mask(0, 1) is not None
    assert not running.take(1, A)
    clock.each = share * MEAN_SECONDS
    for _ in range(200):
        if running.mask(0, 1) is None:
            break
        running.take(1, A)
    ended = running.error(1) is not None
    assert ended == (share > 0.5)
    if ended:
        assert "too ambiguous" in str(running.error(1))


def test_slow_masks_behind_guesses_are_left_for_when_they_are_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running = grammars()
    running.open(1, params(regex("a*")), [])
    monkeypatch.setattr(time, "thread_time", Clock(0.006))
    running.prepare([1] * 9, [A] * 8 + [LAST])
    assert sorted(running._prepared) == [0, 1]
    monkeypatch.setattr(time, "thread_time", Clock(0.0))
    for sample in range(9):
        assert A in allowed(running, sample)
        running.take(1, A)


@pytest.mark.parametrize("guess", [A, B])
def test_masks_behind_guesses_count_when_they_are_used(
    guess: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = grammars()
    running.open(1, params(regex("[ab]*")), [])
    clock = Clock(0.0)
    monkeypatch.setattr(time, "thread_time", clock)
    running.prepare([1], [LAST])
    clock.each = 1.01 * MOST_SECONDS
    monkeypatch.setattr(GrammarState, "mask_into", lambda *_: True)  # takes no time
    running.prepare([1, 1], [guess, LAST])
    clock.each = 0.0
    assert sorted(running._prepared) == [0, 1]
    assert running.mask(0, 1) is not None
    running.take(1, A)
    assert (running.mask(1, 1) is None) == (guess == A)
    assert (running.error(1) is not None) == (guess == A)
