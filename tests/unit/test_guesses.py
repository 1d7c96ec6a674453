"""What StepSampler guesses, for whom, and who hears what became of it."""

from collections.abc import Sequence

from drafted_draws import DraftedDraws, Wish, no_drafts, run
from grammar_sources import SMALL_VOCABULARY, SmallGrammars, regex
from step_samplers import (
    ABC,
    A,
    B,
    Scribe,
    always,
    params,
    rows,
    step_sampler,
)
from triptych.engine_core.batch import UNKNOWN_DRAFT
from triptych.engine_core.sampling_params import BeamParams, SamplingParams
from triptych.services.scheduler.logits_processors import LogitsProcessor, Row
from triptych.services.scheduler.running_grammars import LAST
from triptych.services.scheduler.sampler import StepSampler, new_sampler


def test_guesses_are_forced_text_first_and_else_the_drafters() -> None:
    drafter = Scribe()
    sampler = step_sampler(drafter=drafter)
    sampler.open(1, params(), 0, (9,), (8,), "salt")
    sampler.open(2, params(regex("xabcb*")), 0, (9,), (ord("x"),))
    sampler.open(3, params(regex("(a|b)*c")), 0, (9,), (A,))
    sampler.open(4, params(), 0, (9,), ())
    drafter.proposals = {1: [5, 6], 2: [7], 3: [A, B, A, 100, A], 4: [4]}
    assert dict(sampler.drafts()) == {1: [5, 6], 2: [ABC], 3: [A, B, A]}
    assert drafter.asked == [1, 3]
    assert drafter.opened[0] == (1, (9,), (8,), "salt")
    sampler.append([4], [1])
    assert dict(sampler.drafts())[4] == [4]


def test_no_guesses_for_beams_plug_ins_and_what_has_no_output() -> None:
    drafter = Scribe()
    sampler = step_sampler(drafter=drafter)
    drafter.proposals = {each: [5] for each in range(9)}
    sampler.open(1, params(processors=(("nothing", ""),)), 0, (9,), (8,))
    beam = SamplingParams(max_tokens=5, logprobs=3, beam=BeamParams(width=2))
    sampler.open(2, beam, 0, (9,), (8,))
    sampler.open(3, params(), 0, (9,), ())
    sampler.open(4, params(regex("abc"), processors=(("nothing", ""),)), 0, (9,), (A,))
    assert list(sampler.drafts()) == []
    assert [each[0] for each in drafter.opened] == [3]
    for sequence_id in (1, 2, 3, 4):
        sampler.close(sequence_id)
    assert not sampler._unstarted
    assert not sampler._guessed_for


def test_the_draft_model_guesses_for_nobody_who_has_a_grammar() -> None:
    drafter = Scribe()
    sampler = step_sampler(drafter=drafter)
    drafter.proposals = {1: [UNKNOWN_DRAFT] * 2, 2: [UNKNOWN_DRAFT] * 2}
    sampler.open(1, params(), 0, (9,), (8,))
    sampler.open(2, params(regex("(a|b)*")), 0, (9,), (A,))
    assert dict(sampler.drafts()) == {1: [UNKNOWN_DRAFT] * 2}
    assert drafter.closed == [2], "it is asked for nothing that cannot be used"


def test_the_drafter_hears_what_became_of_its_own_guesses() -> None:
    drafter = Scribe()
    sampler = step_sampler(drafter=drafter)
    for sequence_id in (1, 2, 3, 4):
        sampler.open(sequence_id, params(), 0, (9,), (8,))
    sampler.open(5, params(regex("xabcb*")), 0, (9,), (ord("x"),))
    drafter.proposals = {1: [10, 11, 12], 2: [10, 11], 4: [10]}
    assert len(list(sampler.drafts())) == 4
    # The plan took 2 of the 3 guesses for the first, all for the second, none for the fourth.
    ids = [1, 1, 1, 2, 2, 2, 3, 4, 5, 5]
    drafts = [10, 11, LAST, 10, 11, LAST, LAST, LAST, ABC, LAST]
    drawn = sampler.draw(rows(10, 11, 12, 10, 40, 12, 7, 7, 7, 7), ids, range(10), drafts)
    assert drawn.token_ids[:8] == [10, 11, 12, 10, 40, -1, 7, 7]
    assert drafter.heard == [(1, 2, 2), (2, 2, 1)]
    sampler.append([1, 1, 1], [10, 11, 12])
    assert drafter.appended == [(1, 10), (1, 11), (1, 12)]


def test_forced_text_that_is_cut_otherwise_is_guessed_less() -> None:
    inner = new_sampler("native", SMALL_VOCABULARY, processed_logprobs=False)
    sampler = StepSampler(inner, {}, SmallGrammars(forcing=False))
    sampler.open(1, params(regex("x(ab){40}")), 0, (9,), (ord("x"),))
    (guess,) = (tokens for _, tokens in sampler.drafts())
    ab = guess[0]
    assert guess == [ab] * 32
    drafts = [*guess[:4], LAST]  # what the plan had room for
    drawn = sampler.draw(rows(ab, A, B, ab, ab), [1] * 5, range(5), drafts)
    assert drawn.token_ids == [ab, A, -1, -1, -1]
    sampler.append([1, 1], [ab, A])
    (guess,) = (tokens for _, tokens in sampler.drafts())
    assert len(guess) == 2


def test_plug_ins_see_the_tokens_that_are_out_beside_waves_of_others() -> None:
    seen: list[tuple[int, ...]] = []

    def looks(argument: str) -> LogitsProcessor:
        def process(prompt_ids: Sequence[int], output_ids: Sequence[int], logits: Row) -> None:
            del prompt_ids, logits
            seen.append(tuple(output_ids))

        assert argument == ""
        return process

    inner = new_sampler("native", SMALL_VOCABULARY, processed_logprobs=False)
    sampler = StepSampler(inner, {"looks": looks}, SmallGrammars())
    draws = DraftedDraws(sampler, lambda sequence_id, tokens: rows(len(tokens))[0])
    draws.start(Wish(1, params(processors=(("looks", ""),), max_tokens=4), output_ids=(50,)))
    draws.start(Wish(2, params(max_tokens=9), output_ids=(50,)))
    while draws.open:
        draws.step(lambda sequence_id, output: [len(output) + 2] * (sequence_id == 2))
    assert seen == [(50,), (50, 3), (50, 3, 4)]
    assert draws.results[2].accepted > 0


def test_what_ran_leaves_nothing() -> None:
    drafter = Scribe()
    sampler = step_sampler(drafter=drafter)
    wishes = [Wish(each, params(regex("(ab)*c"), seed=each, temperature=1.0)) for each in range(5)]
    run(sampler, wishes, always(A), no_drafts)
    assert sampler.num_grammars == 0
    kept = [sampler._params, sampler._ahead, sampler._guessed_for, sampler._unstarted]
    assert not any(kept)
    assert sorted(drafter.closed) == list(range(5))
