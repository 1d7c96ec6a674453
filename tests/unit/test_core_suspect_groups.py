"""Suspects that are several: choices of a prompt, beams; and what another core takes over."""

import pytest

from batch_twins import TWINS
from core_engine import BIG, BatchFactory, Engine, Shape, wish
from hash_model import expected_beams, expected_output
from mortal_engine import MortalEngine, Poison, ended_with
from suspect_cases import assert_whole, in_step, lose_in_step, submit, suspected
from triptych.engine_core.errors import FatalRequest, QueueFull, TooLong
from triptych.engine_core.ids import RequestId
from triptych.engine_core.request import Request
from triptych.engine_core.sampling_params import BeamParams, SamplingParams

PROMPT = (6, 4, 2)


@pytest.fixture(params=TWINS, ids=["python", "native"])
def batch(request: pytest.FixtureRequest) -> BatchFactory:
    factory: BatchFactory = request.param
    return factory


@pytest.fixture
def engine(batch: BatchFactory) -> MortalEngine:
    return MortalEngine(BIG, batch)


# --------------------------------------------------------------------------------- choices, beams


def several(number: int, n: int, max_tokens: int = 4) -> Request:
    return Request(RequestId(number), PROMPT, SamplingParams(max_tokens=max_tokens, n=n))


def test_choices_without_a_token_stand_trial_together(engine: MortalEngine) -> None:
    wishes = [several(10, 3), *submit(engine, (1,))]
    engine.submit(wishes[0])
    lose_in_step(engine)
    assert suspected(engine) == {1, 10, 11, 12}
    assert in_step(engine) == [1]
    engine.end()
    assert in_step(engine) == [1, 10]
    assert set(engine.end().request_ids) == {1, 10, 11, 12}
    assert not suspected(engine)
    assert_whole(engine, wishes)


def test_a_prompt_that_was_computed_clears_all_that_wait_for_it(batch: BatchFactory) -> None:
    engine = MortalEngine(Shape(num_blocks=20, max_num_seqs=2), batch)
    request = several(10, 4)
    engine.submit(request)
    lose_in_step(engine)
    assert suspected(engine) == {10, 11, 12, 13}
    assert in_step(engine) == [10]
    assert set(engine.end().request_ids) == {10, 11}
    assert not suspected(engine)
    assert_whole(engine, [request])


def test_a_prompt_that_kills_ends_all_choices_of_its_request(engine: MortalEngine) -> None:
    request = several(10, 3)
    engine.submit(request)
    wishes = submit(engine, (1,))
    poison = Poison(request, 1)
    engine.poisons.append(poison)
    assert_whole(engine, wishes)
    assert ended_with(engine, FatalRequest) == {10, 11, 12}
    assert engine.scheduler.suspects.fatal_total == 3
    assert engine.deaths == {poison: 3}


def test_a_choice_with_tokens_stands_trial_by_itself(engine: MortalEngine) -> None:
    request = several(10, 3)
    engine.submit(request)
    poison = Poison(request, len(PROMPT), index=1)
    engine.poisons.append(poison)
    assert_whole(engine, [])
    assert ended_with(engine, FatalRequest) == {11}
    assert engine.outputs[RequestId(11)] == expected_output(request, 1)[:1]
    for index in (0, 2):
        assert engine.outputs[RequestId(10 + index)] == expected_output(request, index)
    assert engine.deaths == {poison: 3}


def test_choices_whose_leader_is_given_up_inherit_its_strike(engine: MortalEngine) -> None:
    engine.submit(several(10, 3))
    lose_in_step(engine)
    engine.abort(RequestId(10))
    assert in_step(engine) == [11]
    engine.lose()
    assert ended_with(engine, FatalRequest) == {11, 12}


def search(number: int, n: int = 2, width: int = 3) -> Request:
    params = SamplingParams(max_tokens=4, n=n, beam=BeamParams(width=width))
    return Request(RequestId(number), PROMPT, params)


def test_the_beams_of_a_search_stand_trial_together(engine: MortalEngine) -> None:
    request = search(10)
    engine.submit(request)
    wishes = submit(engine, (1,), max_tokens=9)
    for _ in range(2):
        engine.begin()
        engine.end()
    lose_in_step(engine)
    assert suspected(engine) == {1, 10, 11}
    while 10 in suspected(engine):  # several of them beside one another
        assert suspected(engine) == {1, 10, 11}
        assert set(in_step(engine)) == {10}
        engine.end()
    assert suspected(engine) == {1}
    assert_whole(engine, wishes)
    assert [engine.outputs[each] for each in request.choices()] == expected_beams(request)


def test_a_search_that_is_given_up_holds_up_nobody(engine: MortalEngine) -> None:
    engine.submit(search(10))
    wishes = submit(engine, (1,))
    lose_in_step(engine)
    for number in (10, 11):
        assert in_step(engine) == [10]
        engine.abort(RequestId(number))
        if number == 10:
            assert suspected(engine) == {1, 11}
            engine.lose()  # a strike
    engine.end()
    assert suspected(engine) == {1}
    assert in_step(engine) == [1]
    engine.end()
    assert_whole(engine, wishes)


@pytest.mark.parametrize("position", [0, 4])
def test_a_search_that_kills_ends_as_a_whole(engine: MortalEngine, position: int) -> None:
    request = search(10)
    engine.submit(request)
    wishes = submit(engine, (1,), max_tokens=9)
    poison = Poison(request, position)
    engine.poisons.append(poison)
    assert_whole(engine, wishes)
    assert ended_with(engine, FatalRequest) == {10, 11}
    assert engine.deaths == {poison: 3}


def test_a_search_is_cleared_by_the_last_of_its_beams(batch: BatchFactory) -> None:
    """They may be computed in several steps: those that wait may kill as well."""
    shape = Shape(num_blocks=24, max_num_seqs=3, max_num_batched_tokens=5, prefix_caching=False)
    engine = MortalEngine(shape, batch)
    request = search(10)
    engine.submit(request)
    for _ in range(2):
        engine.begin()
        engine.end()
    lose_in_step(engine)
    steps = 0
    while suspected(engine):
        assert suspected(engine) == {10, 11}
        engine.begin()
        engine.end()
        steps += 1
    assert steps > 1
    assert_whole(engine, [])
    assert [engine.outputs[each] for each in request.choices()] == expected_beams(request)


# --------------------------------------------------------------------------------- another core


def test_strikes_outlive_a_core(engine: MortalEngine) -> None:
    submit(engine, (1,))
    lose_in_step(engine)
    engine.move(32)
    assert suspected(engine) == {1}
    lose_in_step(engine)
    assert ended_with(engine, FatalRequest) == {1}
    assert engine.scheduler.suspects.fatal_total == 1


def test_suspects_of_another_core_hold_up_nobody_here(batch: BatchFactory) -> None:
    engine = MortalEngine(Shape(num_blocks=20), batch)
    engine.submit(wish(1, prompt=10, max_tokens=3))
    lose_in_step(engine)
    assert suspected(engine) == {1}
    engine.move(4)
    assert ended_with(engine, TooLong) == {1}
    assert not suspected(engine)
    assert_whole(engine, submit(engine, (2, 3)))


def test_choices_without_a_token_go_to_another_core_together(engine: MortalEngine) -> None:
    request = several(10, 3)
    engine.submit(request)
    lose_in_step(engine)
    (resumed,) = engine.scheduler.resumable()
    assert (resumed.request_id, resumed.params.n, resumed.accepted) == (10, 3, True)
    engine.move(32)
    assert suspected(engine) == {10, 11, 12}
    assert_whole(engine, [request])


def test_a_choice_that_was_given_up_stays_so_in_another_core(engine: MortalEngine) -> None:
    request = search(10)
    engine.submit(request)
    lose_in_step(engine)
    engine.abort(RequestId(10))
    engine.move(32)
    assert not engine.scheduler.lives(RequestId(10))
    assert suspected(engine) == {11}
    engine.run_to_empty()
    engine.assert_empty()
    assert set(engine.endings) == {11}
    assert engine.outputs[RequestId(11)] == expected_beams(request)[1]


def test_what_was_accepted_before_is_not_refused_for_the_queue(batch: BatchFactory) -> None:
    engine = Engine(Shape(max_num_seqs=1, max_num_waiting=0), batch)
    submit(engine, (1,))
    with pytest.raises(QueueFull):
        engine.submit(wish(2))
    resumed = Request(RequestId(2), PROMPT, SamplingParams(max_tokens=2), accepted=True)
    engine.submit(resumed)
    assert engine.scheduler.is_fresh(RequestId(2)), "it may still have waited for too long"
    with pytest.raises(TooLong):
        engine.submit(Request(RequestId(3), PROMPT, SamplingParams(max_tokens=99), accepted=True))
    assert_whole(engine, [resumed])
