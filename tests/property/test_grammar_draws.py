"""Grammars and drafts over random forms, logits and guesses: drafts change nothing, whatever was
carried along is what the tokens alone give, and every finished output matches."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from drafted_draws import DraftsOf, Result, Wish, random_script, run
from grammar_sources import EOS, OTHER_EOS, SMALL_VOCABULARY, SmallGrammars
from random_grammars import Form, forms
from triptych.engine_core.errors import InvalidRequest
from triptych.engine_core.sampling_params import SamplingParams
from triptych.services.scheduler.running_grammars import LAST, RunningGrammars
from triptych.services.scheduler.sampler import StepSampler, new_sampler

ENDS = (EOS, OTHER_EOS)
SOURCE = SmallGrammars()
UNFORCED = SmallGrammars(forcing=False)
SOURCES = st.sampled_from([SOURCE, UNFORCED])
Value = TypeVar("Value")
seeds = st.integers(0, 2**32 - 1)


def random_params(rng: np.random.Generator, grammar: str) -> SamplingParams:
    """Everything that is drawn with, each off half the time."""

    def some(values: Sequence[Value], off: Value) -> Value:
        return values[int(rng.integers(len(values)))] if rng.random() < 0.5 else off

    def ids(most: int) -> tuple[int, ...]:
        return tuple(rng.integers(0, SMALL_VOCABULARY, rng.integers(1, most)).tolist())

    max_tokens = int(rng.integers(1, 30))
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min(max_tokens, some([1, 3, 8], 0)),
        temperature=some([0.0, 0.5, 2.0], 1.0),
        top_k=some([1, 20], 0),
        top_p=some([0.5, 0.95], 1.0),
        repetition_penalty=some([0.7, 1.3], 1.0),
        presence_penalty=some([0.5], 0.0),
        frequency_penalty=some([-0.3, 0.8], 0.0),
        no_repeat_ngram_size=some([0, 3, 5], 0),
        seed=int(rng.integers(0, 2**63)),
        stop_token_ids=some([(), (EOS,), (*ENDS, ord("b"))], ENDS),
        logit_bias=some([((ord("a"), 2.0), (EOS, -3.0))], ()),
        bad_words=some([tuple((*ids(3), *ids(3)) for _ in range(3)), ((ord("c"),),)], ()),
        grammar=grammar,
        logprobs=some([0, 3], -1),
    )


def step_sampler(source: SmallGrammars) -> StepSampler:
    inner = new_sampler("native", SMALL_VOCABULARY, processed_logprobs=False)
    return StepSampler(inner, {}, source)


def noisy_oracle(plain: dict[int, Result], seed: int) -> DraftsOf:
    """Guesses what was drawn one by one, with some of it wrong."""
    rng = np.random.default_rng(seed)

    def drafts_of(sequence_id: int, output: Sequence[int]) -> Sequence[int]:
        guesses = plain[sequence_id].token_ids[len(output) :][: int(rng.integers(0, 7))]
        wrong = rng.random(len(guesses)) < 0.15
        noise = rng.integers(0, SMALL_VOCABULARY + 9, len(guesses))
        guesses = np.where(wrong, noise, np.array(guesses, np.int64)).astype(int).tolist()
        return [*guesses, *rng.integers(0, SMALL_VOCABULARY, rng.integers(0, 3)).tolist()]

    return drafts_of


@given(st.lists(forms, min_size=1, max_size=3), seeds, st.booleans(), SOURCES)
def test_drafts_change_no_token_and_no_logprob(
    found: list[Form], seed: int, prepare: bool, source: SmallGrammars
) -> None:
    rng = np.random.default_rng(seed)
    wishes = [
        Wish(number, random_params(rng, each), choice=int(rng.integers(3)))
        for number, each in enumerate([*(form.grammar for form in found), ""])
    ]
    script = random_script(seed, SMALL_VOCABULARY)
    plain = run(step_sampler(source), wishes, script, prepare=prepare)
    sampler = step_sampler(source)
    drafted = run(sampler, wishes, script, noisy_oracle(plain, seed))
    assert drafted == plain
    assert not sampler._params
    assert not sampler._ahead
    for number, form in enumerate(found):
        check_output(form, wishes[number].params, plain[number])


def check_output(form: Form, params: SamplingParams, result: Result) -> None:
    """A finished output matches, but for what a stop id of the request's own cut off."""
    if result.error is not None:
        assert isinstance(result.error, InvalidRequest)
        assert result.error.field == "structured_output"
        assert "leaves no token" in result.error.description, "no matcher failed"
        return
    cut = ord("b") in params.stop_token_ids and result.token_ids[-1:] == [ord("b")]
    if result.finish == "stop" and not cut:
        text = SOURCE.text(result.token_ids)
        assert form.matches(text), (form.name, text)
    ends = [token for token in result.token_ids if token in ENDS]
    assert len(ends) <= 1
    assert not ends or result.token_ids[-1] == ends[0]


@given(forms, seeds, SOURCES)
def test_what_is_forced_is_drawn_and_ends_in_time(
    form: Form, seed: int, source: SmallGrammars
) -> None:
    """Guesses of StepSampler's own, beside which nothing is offered."""
    wish = Wish(1, SamplingParams(max_tokens=40, grammar=form.grammar, stop_token_ids=ENDS, seed=1))
    script = random_script(seed, SMALL_VOCABULARY)
    plain = run(step_sampler(source), [wish], script)[1]
    sampler = step_sampler(source)

    def forced(sequence_id: int, output: Sequence[int]) -> Sequence[int]:
        return dict(sampler.drafts()).get(sequence_id, ()) if output else ()

    drafted = run(sampler, [wish], script, forced)[1]
    assert drafted == plain
    assert drafted.steps <= plain.steps
    check_output(form, wish.params, plain)


def words(running: RunningGrammars, sample: int, sequence_id: int) -> NDArray[np.uint32]:
    mask = running.mask(sample, sequence_id)
    assert mask is not None, running.error(sequence_id)
    return mask.words.copy()


@given(forms, seeds, SOURCES)
def test_the_tokens_alone_give_the_state_that_was_carried_along(
    form: Form, seed: int, source: SmallGrammars
) -> None:
    """At every prefix: after masks behind drafts, legal or not; in a fork; in another process."""
    rng = np.random.default_rng(seed)
    params = SamplingParams(
        max_tokens=40, min_tokens=int(rng.integers(0, 5)), grammar=form.grammar, stop_token_ids=ENDS
    )
    wish = Wish(1, params)
    output = run(step_sampler(source), [wish], random_script(seed, SMALL_VOCABULARY))[1].token_ids
    carried = RunningGrammars(source)
    carried.open(1, params, [])
    for count, token in enumerate(output):
        guesses = output[count : count + int(rng.integers(0, 4))]
        guesses = [*guesses, *rng.integers(0, SMALL_VOCABULARY, 2).tolist()]
        carried.prepare([1] * (len(guesses) + 1), [*guesses, LAST])
        carried.legal(1, guesses)
        carried.forced(1)
        behind = {sample: each.mask.words.copy() for sample, each in carried._prepared.items()}
        for sample, mask in behind.items():
            rebuilt = RunningGrammars(source)
            rebuilt.open(7, params, [*output[:count], *guesses[:sample]])
            np.testing.assert_array_equal(words(rebuilt, 0, 7), mask)
        np.testing.assert_array_equal(words(carried, 0, 1), behind[0])
        carried.open(2, params, output[:count])  # a fork
        np.testing.assert_array_equal(words(carried, 99, 2), behind[0])
        carried.take(1, token)
        assert carried.error(1) is None
