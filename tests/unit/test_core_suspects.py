"""Who is suspected when an executor dies, who may run then, and whom it ends; over both batches."""

import pytest

from batch_twins import TWINS
from core_engine import BIG, BatchFactory, Shape, wish
from mortal_engine import MortalEngine, Poison, ended_with
from suspect_cases import assert_whole, in_step, lose_in_step, submit, suspected
from triptych.engine_core.errors import FatalRequest
from triptych.engine_core.ids import RequestId


@pytest.fixture(params=TWINS, ids=["python", "native"])
def batch(request: pytest.FixtureRequest) -> BatchFactory:
    factory: BatchFactory = request.param
    return factory


@pytest.fixture
def engine(batch: BatchFactory) -> MortalEngine:
    return MortalEngine(BIG, batch)


# --------------------------------------------------------------------------------- one at a time


def test_suspects_run_one_at_a_time_until_each_has_a_token(engine: MortalEngine) -> None:
    wishes = submit(engine, (1, 2, 3))
    lose_in_step(engine)
    assert not engine.endings
    assert suspected(engine) == {1, 2, 3}
    assert in_step(engine) == [1]
    engine.end()
    assert suspected(engine) == {2, 3}
    assert in_step(engine) == [1, 2]
    engine.end()
    assert in_step(engine) == [1, 2, 3]
    engine.end()
    assert not suspected(engine)
    assert_whole(engine, wishes)


def test_only_what_was_computed_is_suspected(batch: BatchFactory) -> None:
    engine = MortalEngine(Shape(max_num_seqs=2), batch)
    submit(engine, (1, 2, 3))
    engine.lose()  # nothing was
    assert not suspected(engine)
    assert in_step(engine) == [1, 2]
    engine.lose()
    engine.lose()
    assert suspected(engine) == {1, 2}


def test_others_run_beside_a_suspect_and_past_one_that_waits(engine: MortalEngine) -> None:
    wishes = submit(engine, (1, 2))
    lose_in_step(engine)
    wishes += submit(engine, (3, 4))
    assert in_step(engine) == [1, 3, 4]
    engine.end()
    assert_whole(engine, wishes)


def test_a_prompt_in_chunks_is_on_trial_to_the_last_of_them(batch: BatchFactory) -> None:
    engine = MortalEngine(Shape(num_blocks=20, max_num_batched_tokens=4), batch)
    wishes = [wish(1, prompt=9), wish(2, prompt=2)]
    for request in wishes:
        engine.submit(request)
    lose_in_step(engine)  # nothing of 2 was computed
    assert suspected(engine) == {1}
    for _ in range(3):
        assert suspected(engine) == {1}
        engine.begin()
        engine.end()
    assert not suspected(engine)
    assert_whole(engine, wishes)


def test_newcomers_leave_places_to_suspects_that_wait(batch: BatchFactory) -> None:
    engine = MortalEngine(Shape(num_blocks=64, max_num_batched_tokens=64), batch)
    wishes = submit(engine, (1, 2))
    lose_in_step(engine)
    wishes += submit(engine, (3, 4, 5))
    assert in_step(engine) == [1, 3]  # the third place is kept for 2
    engine.end()
    assert in_step(engine) == [1, 2, 3]
    engine.end()
    assert_whole(engine, wishes)


def test_newcomers_leave_blocks_to_suspects_that_wait(batch: BatchFactory) -> None:
    shape = Shape(num_blocks=6, max_num_seqs=8, max_num_batched_tokens=64)
    engine = MortalEngine(shape, batch)
    wishes = submit(engine, (1, 2), max_tokens=1)  # two blocks each
    lose_in_step(engine)
    newcomers = [wish(3, prompt=2, max_tokens=1), wish(4, prompt=5, max_tokens=1)]
    for request in newcomers:
        engine.submit(request)
    assert in_step(engine) == [1, 3]
    engine.end()
    assert_whole(engine, wishes + newcomers)


def test_a_pool_for_one_sequence(batch: BatchFactory) -> None:
    engine = MortalEngine(Shape(num_blocks=3, max_model_len=6), batch)
    wishes = submit(engine, (1, 2), max_tokens=3)
    lose_in_step(engine)
    submit(engine, (3,), max_tokens=3)
    assert_whole(engine, wishes)


@pytest.mark.parametrize("steps", range(6))
def test_a_suspect_may_be_preempted(batch: BatchFactory, steps: int) -> None:
    engine = MortalEngine(Shape(num_blocks=4, max_num_batched_tokens=9), batch)
    wishes = [wish(1, max_tokens=6), wish(2, max_tokens=6, priority=1), wish(3, max_tokens=6)]
    for request in wishes:
        engine.submit(request)
    for _ in range(steps):
        engine.begin()
        engine.end()
    lose_in_step(engine)
    assert_whole(engine, wishes)
    assert engine.scheduler.preemptions_total > 0


# --------------------------------------------------------------------------------- strikes


def test_the_second_death_in_a_row_of_one_alone_ends_it(engine: MortalEngine) -> None:
    submit(engine, (1,))
    engine.begin()
    assert not engine.scheduler.lost().failed
    engine.begin()
    output = engine.scheduler.lost()
    (failed,) = output.failed
    assert failed.request_id == 1
    assert isinstance(failed.error, FatalRequest)
    assert not output.request_ids
    assert engine.scheduler.suspects.fatal_total == 1
    engine.plan = None
    engine.assert_empty()
    assert not engine.scheduler.suspects


def test_a_token_takes_the_strike_away(engine: MortalEngine) -> None:
    wishes = submit(engine, (1,), max_tokens=9)
    for _ in range(8):
        lose_in_step(engine)
        engine.begin()
        engine.end()
    assert_whole(engine, wishes)


@pytest.mark.parametrize("culprit", [1, 2, 3])
@pytest.mark.parametrize("position", [0, 2, 4])
def test_who_kills_ends_at_the_third_death_and_takes_nobody_along(
    engine: MortalEngine, culprit: int, position: int
) -> None:
    wishes = submit(engine, (1, 2, 3))
    poison = Poison(wishes.pop(culprit - 1), position)
    engine.poisons.append(poison)
    assert_whole(engine, wishes)
    assert ended_with(engine, FatalRequest) == {culprit}
    assert engine.outputs[RequestId(culprit)] == poison.outputs()[RequestId(culprit)]
    assert engine.deaths == {poison: 3}


def test_who_kills_alone_ends_at_the_second_death(engine: MortalEngine) -> None:
    poison = Poison(submit(engine, (1,))[0], 4)
    engine.poisons.append(poison)
    assert_whole(engine, [])
    assert engine.deaths == {poison: 2}


def test_killers_that_keep_coming_end_none_but_themselves(engine: MortalEngine) -> None:
    wishes = submit(engine, (1, 2), max_tokens=9)
    for number in range(10, 20):
        engine.poisons.append(Poison(submit(engine, (number,))[0], 0))
        engine.begin()
        engine.end()
    assert_whole(engine, wishes)
    assert ended_with(engine, FatalRequest) == set(range(10, 20))


def test_who_has_a_strike_is_tried_first_and_alone(engine: MortalEngine) -> None:
    wishes = submit(engine, (1, 2))
    engine.begin()
    engine.end()
    lose_in_step(engine)
    wishes += submit(engine, (3,))
    assert in_step(engine) == [1, 3]
    engine.lose()  # of its suspects only 1 was in that step
    wishes += submit(engine, (4,))
    urgent = wish(5, prompt=3, priority=-1)
    engine.submit(urgent)
    assert in_step(engine) == [1]
    engine.end()
    assert suspected(engine) == {2, 3}
    assert in_step(engine) == [1, 2, 4, 5]
    engine.end()
    assert_whole(engine, [*wishes, urgent])


def test_nobody_before_it_keeps_a_place_from_one_with_a_strike(batch: BatchFactory) -> None:
    engine = MortalEngine(Shape(num_blocks=20, max_num_seqs=2), batch)
    wishes = submit(engine, (1,))
    lose_in_step(engine)
    for number in (2, 3, 4):
        wishes.append(wish(number, prompt=3, priority=-1))
        engine.submit(wishes[-1])
    assert in_step(engine) == [1]
    engine.end()
    assert_whole(engine, wishes)


def test_who_was_given_up_in_the_step_may_have_done_it(engine: MortalEngine) -> None:
    wishes = submit(engine, (1, 2))
    for _ in range(2):
        engine.begin()
        engine.abort(RequestId(2))
        engine.lose()
        wishes = wishes[:1]
    assert suspected(engine) == {1}
    assert not engine.endings, "it was alone only once"
    assert_whole(engine, wishes)


# --------------------------------------------------------------------------------- given up


@pytest.mark.parametrize("running", [True, False])
def test_a_suspect_that_is_given_up_holds_up_nobody(engine: MortalEngine, running: bool) -> None:
    wishes = submit(engine, (1, 2, 3))
    lose_in_step(engine)
    if running:
        assert in_step(engine) == [1]
    engine.abort(RequestId(1))
    assert suspected(engine) == {2, 3}
    if running:
        engine.end()
    assert in_step(engine) == [2]
    engine.end()
    assert_whole(engine, wishes[1:])


def test_one_with_a_strike_that_is_given_up_holds_up_nobody(engine: MortalEngine) -> None:
    submit(engine, (1,))
    lose_in_step(engine)
    wishes = submit(engine, (2, 3))
    assert in_step(engine) == [1]
    engine.abort(RequestId(1))
    engine.end()
    assert in_step(engine) == [2, 3]
    engine.end()
    assert_whole(engine, wishes)


def test_an_id_that_is_used_again_is_not_suspected(engine: MortalEngine) -> None:
    submit(engine, (1, 2))
    lose_in_step(engine)
    engine.abort(RequestId(1))
    wishes = submit(engine, (1,))
    assert suspected(engine) == {2}
    assert in_step(engine) == [1, 2]
    engine.end()
    assert_whole(engine, wishes)
