"""One behaviour of the scheduler a test, over both twins; the property tests do the rest."""

import pytest

from core_strategies import VOCABULARY, Engine, Shape, TwinsFactory, expected_output
from triptych.engine_core.errors import NotFinite, QueueFull, TooLong, Unavailable
from triptych.engine_core.ids import RequestId
from triptych.engine_core.request import Request
from triptych.engine_core.sampling_params import SamplingParams
from triptych.engine_core.scheduler import Scheduler
from triptych.engine_core.step import (
    Failed,
    FinishReason,
    StepPlan,
    StepResult,
    Token,
)
from triptych.engine_core.twins import python_twins
from triptych.kernels.core import native_twins


@pytest.fixture(params=[python_twins, native_twins], ids=["python", "native"])
def twins(request: pytest.FixtureRequest) -> TwinsFactory:
    factory: TwinsFactory = request.param
    return factory


@pytest.fixture
def engine(twins: TwinsFactory) -> Engine:
    return Engine(Shape(), twins)


def wish(number: int, prompt: int = 2, max_tokens: int = 3, priority: int = 0) -> Request:
    tokens = tuple((number + index) % VOCABULARY for index in range(prompt))
    params = SamplingParams(max_tokens=max_tokens)
    return Request(RequestId(number), tokens, params, priority)


def rows(plan: StepPlan) -> list[tuple[int, int, int, bool]]:
    return list(plan.rows)


def test_a_request_from_prompt_to_last_token(engine: Engine) -> None:
    request = wish(1)
    engine.submit(request)
    assert (engine.scheduler.num_waiting, engine.scheduler.num_running) == (1, 0)
    assert rows(engine.begin()) == [(0, 0, 2, True)]
    assert engine.scheduler.num_free_blocks == 5
    output = expected_output(request)
    assert engine.end() == [Token(RequestId(1), output[0], None)]
    assert rows(engine.begin()) == [(0, 2, 1, True)]
    assert engine.end() == [Token(RequestId(1), output[1], None)]
    engine.begin()
    assert engine.end() == [Token(RequestId(1), output[2], FinishReason.LENGTH)]
    assert engine.scheduler.num_free_blocks == 6
    assert not engine.begin()


def test_a_long_prompt_is_computed_in_chunks_and_sampled_once(engine: Engine) -> None:
    engine.submit(wish(1, prompt=10, max_tokens=2))
    assert rows(engine.begin()) == [(0, 0, 4, False)]
    assert engine.end() == []
    assert rows(engine.begin()) == [(0, 4, 4, False)]
    engine.end()
    assert rows(engine.begin()) == [(0, 8, 2, True)]
    assert len(engine.end()) == 1


def test_decodes_go_on_beside_a_long_prompt(engine: Engine) -> None:
    engine.submit(wish(1, prompt=1, max_tokens=4))
    engine.begin()
    engine.end()
    engine.submit(wish(2, prompt=8, max_tokens=1, priority=-1))
    assert rows(engine.begin()) == [(0, 1, 1, True), (1, 0, 3, False)]
    engine.end()
    # The prompt is first in order now, and still leaves the decode its token.
    assert rows(engine.begin()) == [(1, 3, 3, False), (0, 2, 1, True)]


def test_lower_priority_numbers_go_first_then_arrival(twins: TwinsFactory) -> None:
    engine = Engine(Shape(max_num_seqs=1), twins)
    for number, priority in ((1, 0), (2, -1), (3, 0), (4, -1)):
        engine.submit(wish(number, max_tokens=1, priority=priority))
    order = []
    while engine.begin():
        order += [event.request_id for event in engine.end()]
    assert order == [2, 4, 1, 3]


def test_the_latest_of_the_least_important_is_preempted_and_resumes(twins: TwinsFactory) -> None:
    engine = Engine(Shape(num_blocks=4, max_num_batched_tokens=9), twins)
    wishes = [wish(1, max_tokens=6), wish(2, max_tokens=6, priority=1), wish(3, max_tokens=6)]
    for request in wishes:
        engine.submit(request)
    engine.begin()
    engine.end()
    plan = engine.begin()
    assert plan.preempted == (1,)
    assert [row.sequence_id for row in plan.rows] == [0, 2]
    assert engine.scheduler.num_waiting == engine.scheduler.preemptions_total == 1
    engine.run_to_empty()
    for request in wishes:
        assert engine.outputs[request.request_id] == expected_output(request)


def test_a_resumed_request_goes_on_where_it_was(engine: Engine) -> None:
    whole = wish(1, max_tokens=5)
    output = expected_output(whole)
    engine.submit(Request(RequestId(2), whole.prompt_token_ids, whole.params, 0, tuple(output[:3])))
    plan = engine.begin()
    assert plan.num_tokens == 4
    engine.end()
    assert [row.position for row in engine.scheduler.sample_rows(engine.begin())] == [3]
    engine.end()
    engine.run_to_empty()
    assert engine.outputs[RequestId(2)] == output[3:]


def test_sample_rows_carry_parameters_position_and_banned_ids(engine: Engine) -> None:
    params = SamplingParams(
        max_tokens=3, min_tokens=1, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=7,
        stop_token_ids=(2, 4),
    )  # fmt: skip
    engine.submit(Request(RequestId(1), (1, 2), params))
    (row,) = engine.scheduler.sample_rows(engine.begin())
    assert row == (0.5, 3, 0.9, 0.1, 7, 0, 0, (2, 4))
    engine.end()
    (row,) = engine.scheduler.sample_rows(engine.begin())
    assert (row.position, row.banned) == (1, ())


def test_abort_in_every_state(engine: Engine) -> None:
    scheduler = engine.scheduler
    for number in range(1, 5):
        engine.submit(wish(number, prompt=1))
    engine.begin()
    free = scheduler.num_free_blocks
    assert scheduler.abort(RequestId(4))  # waiting
    assert scheduler.abort(RequestId(1))  # in flight
    assert not scheduler.abort(RequestId(1))
    assert not scheduler.abort(RequestId(99))
    assert scheduler.num_free_blocks == free, "the executor may still write to them"
    assert {event.request_id for event in engine.end()} == {2, 3}
    assert scheduler.num_free_blocks == free + 1
    assert scheduler.abort(RequestId(2))  # running, between steps
    assert scheduler.num_free_blocks == free + 2
    scheduler.check()
    engine.run_to_empty()
    assert not scheduler.abort(RequestId(3))  # ended
    assert scheduler.num_free_blocks == 6
    assert scheduler.num_requests == 0


def test_not_finite_fails_one_request_only(engine: Engine) -> None:
    engine.submit(wish(1))
    engine.submit(wish(2))
    engine.begin()
    first, second = engine.end(broken=frozenset({0}))
    assert isinstance(first, Failed)
    assert isinstance(first.error, NotFinite)
    assert "output token 0" in first.error.message
    assert isinstance(second, Token)
    engine.scheduler.check()
    assert engine.scheduler.num_requests == 1


def test_a_failed_step_ends_its_requests_and_no_others(engine: Engine) -> None:
    for number in range(1, 5):
        engine.submit(wish(number, prompt=1))
    engine.begin()
    engine.abort(RequestId(1))
    error = Unavailable("the step raised", 100)
    engine.fail_step(error)
    assert engine.endings == {2: error, 3: error}
    assert engine.scheduler.num_free_blocks == 6
    engine.run_to_empty()
    assert engine.endings[RequestId(4)] is FinishReason.LENGTH


def test_after_a_loss_everything_is_computed_again(engine: Engine) -> None:
    wishes = [wish(1), wish(2, prompt=3), wish(3, prompt=1)]
    for request in wishes:
        engine.submit(request)
    engine.begin()
    engine.end()
    engine.begin()
    engine.abort(RequestId(3))
    engine.lose()
    scheduler = engine.scheduler
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 2)
    assert scheduler.num_free_blocks == 6
    scheduler.check()
    engine.run_to_empty()
    for request in wishes[:2]:
        assert engine.outputs[request.request_id] == expected_output(request)
    engine.lose()  # nothing runs: nothing happens
    assert scheduler.preemptions_total == 0


def test_refusals_keep_nothing(engine: Engine) -> None:
    with pytest.raises(TooLong):
        engine.scheduler.submit(wish(1, prompt=12, max_tokens=1))
    for number in range(11):
        engine.submit(wish(number))
    with pytest.raises(QueueFull):
        engine.scheduler.submit(wish(11))
    assert engine.scheduler.num_requests == 11
    engine.scheduler.check()
    engine.run_to_empty()
    assert set(engine.endings) == set(range(11))


def test_misuse_is_a_bug(engine: Engine) -> None:
    scheduler: Scheduler = engine.scheduler
    result = StepResult(1, (0,))
    with pytest.raises(AssertionError, match="no step is in flight"):
        scheduler.apply(result)
    with pytest.raises(AssertionError, match="no step is in flight"):
        scheduler.fail_step(Unavailable("", 1))
    engine.submit(wish(1))
    with pytest.raises(AssertionError, match="is in use"):
        engine.submit(wish(1))
    plan = engine.begin()
    with pytest.raises(AssertionError, match="one step in flight at a time"):
        scheduler.plan()
    with pytest.raises(AssertionError, match="result of 7, not 1"):
        scheduler.apply(StepResult(7, (0,)))
    with pytest.raises(AssertionError, match="one token for each row"):
        scheduler.apply(StepResult(1, ()))
    with pytest.raises(AssertionError, match="from the sampler"):
        scheduler.apply(StepResult(1, (VOCABULARY,)))
    stale = StepPlan(plan.step_id, plan.rows, plan.num_tokens, plan.num_samples)
    with pytest.raises(AssertionError, match="only the step in flight"):
        scheduler.write(stale, engine.slot)
    with pytest.raises(AssertionError, match="only the step in flight"):
        scheduler.sample_rows(stale)
