"""One behaviour of the scheduler a test, over both batches; the property tests do the rest."""

import pytest

from core_engine import BatchFactory, Engine, Shape, wish
from hash_model import VOCABULARY, expected_output
from triptych.engine_core.errors import NotFinite, QueueFull, TooLong, Unavailable
from triptych.engine_core.ids import RequestId
from triptych.engine_core.python_batch import PythonBatch
from triptych.engine_core.request import Request
from triptych.engine_core.sampling_params import BeamParams, SamplingParams
from triptych.engine_core.scheduler import Scheduler
from triptych.engine_core.step import FinishReason, StepPlan, StepResult
from triptych.kernels.core import Batch as NativeBatch


@pytest.fixture(params=[PythonBatch, NativeBatch], ids=["python", "native"])
def batch(request: pytest.FixtureRequest) -> BatchFactory:
    factory: BatchFactory = request.param
    return factory


@pytest.fixture
def engine(batch: BatchFactory) -> Engine:
    return Engine(Shape(), batch)


def rows(engine: Engine) -> list[tuple[object, ...]]:
    engine.begin()
    return [tuple(row) for row in engine.batch.rows()]


def got(engine: Engine) -> list[tuple[int, int, int]]:
    output = engine.end()
    return list(zip(output.request_ids, output.token_ids, output.finishes, strict=True))


def test_a_request_from_prompt_to_last_token(engine: Engine) -> None:
    request = wish(1)
    engine.submit(request)
    assert (engine.scheduler.num_waiting, engine.scheduler.num_running) == (1, 0)
    assert rows(engine) == [(0, 0, 2, True)]
    assert engine.batch.num_free_blocks == 5
    output = expected_output(request)
    assert got(engine) == [(1, output[0], 0)]
    assert rows(engine) == [(0, 2, 1, True)]
    assert got(engine) == [(1, output[1], 0)]
    engine.begin()
    assert got(engine) == [(1, output[2], FinishReason.LENGTH)]
    assert not engine.begin()
    engine.assert_empty()


def test_a_long_prompt_is_computed_in_chunks_and_sampled_once(engine: Engine) -> None:
    engine.submit(wish(1, prompt=10, max_tokens=2))
    assert rows(engine) == [(0, 0, 4, False)]
    assert got(engine) == []
    assert rows(engine) == [(0, 4, 4, False)]
    engine.end()
    assert rows(engine) == [(0, 8, 2, True)]
    assert len(got(engine)) == 1


def test_a_long_prompt_leaves_room_for_others(batch: BatchFactory) -> None:
    engine = Engine(Shape(num_blocks=20, long_prefill_token_threshold=3), batch)
    engine.submit(wish(1, prompt=8))
    engine.submit(wish(2, prompt=1))
    assert rows(engine) == [(0, 0, 3, False), (1, 0, 1, True)]


def test_decodes_go_on_beside_a_long_prompt(engine: Engine) -> None:
    engine.submit(wish(1, prompt=1, max_tokens=4))
    engine.begin()
    engine.end()
    engine.submit(wish(2, prompt=8, max_tokens=1, priority=-1))
    assert rows(engine) == [(0, 1, 1, True), (1, 0, 3, False)]
    engine.end()
    # The prompt is first in order now, and still leaves the decode its token.
    assert rows(engine) == [(1, 3, 3, False), (0, 2, 1, True)]


def test_lower_priority_numbers_go_first_then_arrival(batch: BatchFactory) -> None:
    engine = Engine(Shape(max_num_seqs=1), batch)
    for number, priority in ((1, 0), (2, -1), (3, 0), (4, -1)):
        engine.submit(wish(number, max_tokens=1, priority=priority))
    order = []
    while engine.begin():
        order += [request_id for request_id, _, _ in got(engine)]
    assert order == [2, 4, 1, 3]


def test_the_latest_of_the_least_important_is_preempted_and_resumes(batch: BatchFactory) -> None:
    engine = Engine(Shape(num_blocks=4, max_num_batched_tokens=9), batch)
    wishes = [wish(1, max_tokens=6), wish(2, max_tokens=6, priority=1), wish(3, max_tokens=6)]
    for request in wishes:
        engine.submit(request)
    engine.begin()
    engine.end()
    plan = engine.begin()
    assert plan.preempted == (1,)
    assert engine.batch.sequence_ids() == [0, 2]
    assert engine.scheduler.num_waiting == engine.scheduler.preemptions_total == 1
    engine.run_to_empty()
    for request in wishes:
        assert engine.outputs[request.request_id] == expected_output(request)


def test_a_new_sequence_leaves_the_watermark_free(batch: BatchFactory) -> None:
    engine = Engine(Shape(num_blocks=4, watermark_blocks=3), batch)
    engine.submit(wish(1))  # alone it may take all
    engine.submit(wish(2))
    engine.begin()
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (1, 1)


def test_a_resumed_request_goes_on_where_it_was(engine: Engine) -> None:
    whole = wish(1, max_tokens=5)
    output = expected_output(whole)
    resumed = Request(RequestId(2), whole.prompt_token_ids, whole.params, 0, tuple(output[:3]))
    engine.submit(resumed)
    engine.cached[RequestId(2)] = 0  # it has started before
    assert engine.begin().num_tokens == 4
    assert not engine.end().started
    engine.run_to_empty()
    assert engine.outputs[RequestId(2)] == output[3:]


# -------------------------------------------------------------------------------------- endings


def test_abort_in_every_state(engine: Engine) -> None:
    scheduler = engine.scheduler
    for number in range(1, 5):
        engine.submit(wish(number, prompt=1))
    engine.begin()
    free = engine.batch.num_free_blocks
    assert scheduler.abort(RequestId(4))  # waiting
    assert scheduler.abort(RequestId(1))  # in flight
    assert not scheduler.abort(RequestId(1))
    assert not scheduler.abort(RequestId(99))
    assert engine.batch.num_free_blocks == free, "the executor may still write to them"
    assert set(engine.end().request_ids) == {2, 3}
    assert engine.batch.num_free_blocks == free + 1
    assert scheduler.abort(RequestId(2))  # running, between steps
    assert engine.batch.num_free_blocks == free + 2
    scheduler.check()
    engine.run_to_empty()
    assert not scheduler.abort(RequestId(3))  # ended
    engine.assert_empty()


def test_not_finite_fails_one_request_only(engine: Engine) -> None:
    engine.submit(wish(1))
    engine.submit(wish(2))
    engine.begin()
    output = engine.end(broken=frozenset({0}))
    (failed,) = output.failed
    assert failed.request_id == 1
    assert isinstance(failed.error, NotFinite)
    assert list(output.request_ids) == [2]
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
    assert engine.batch.num_free_blocks == 6
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
    assert engine.batch.num_free_blocks == 6
    assert engine.batch.num_cached_blocks == 0, "the cache went with the executor"
    scheduler.check()
    engine.run_to_empty()
    for request in wishes[:2]:
        assert engine.outputs[request.request_id] == expected_output(request)
    engine.lose()  # nothing runs: nothing happens
    assert scheduler.preemptions_total == 0


def test_refusals_keep_nothing(engine: Engine) -> None:
    with pytest.raises(TooLong):
        engine.scheduler.submit(wish(1, prompt=12, max_tokens=1))
    for number in range(10):
        engine.submit(wish(number))
    with pytest.raises(QueueFull):
        engine.scheduler.submit(Request(RequestId(20), (1,), SamplingParams(max_tokens=1, n=2)))
    engine.submit(wish(10))
    with pytest.raises(QueueFull):
        engine.scheduler.submit(wish(11))
    assert engine.scheduler.num_requests == 11
    engine.scheduler.check()
    engine.run_to_empty()
    assert set(engine.endings) == set(range(11))


def test_only_what_never_ran_is_fresh(batch: BatchFactory) -> None:
    engine = Engine(Shape(max_num_seqs=1), batch)
    engine.submit(wish(1))
    engine.submit(wish(2))
    assert engine.scheduler.is_fresh(RequestId(1))
    engine.begin()
    assert not engine.scheduler.is_fresh(RequestId(1))
    assert engine.scheduler.is_fresh(RequestId(2))
    assert not engine.scheduler.is_fresh(RequestId(3))
    engine.lose()
    assert not engine.scheduler.is_fresh(RequestId(1)), "it waits, but it has run"


def test_a_request_runs_when_one_of_its_choices_does(batch: BatchFactory) -> None:
    engine = Engine(Shape(max_num_seqs=1), batch)
    engine.submit(Request(RequestId(1), (1, 2), SamplingParams(max_tokens=3, n=3)))
    choices = [RequestId(each) for each in (1, 2, 3)]
    assert all(map(engine.scheduler.is_fresh, choices))
    engine.begin()
    assert not any(map(engine.scheduler.is_fresh, choices))


def test_many_choices_that_wait_for_their_prompt_stop_nobody(batch: BatchFactory) -> None:
    shape = Shape(num_blocks=60, max_num_seqs=4, max_num_waiting=99, long_prefill_token_threshold=1)
    engine = Engine(shape, batch)
    engine.submit(Request(RequestId(1), (1, 2, 3, 4, 5), SamplingParams(max_tokens=2, n=90)))
    engine.submit(wish(200))
    engine.begin()  # one token of five of the prompt that 89 choices wait for
    assert not engine.scheduler.is_fresh(RequestId(200)), "there is a place, and room in the step"
    engine.end()
    engine.run_to_empty()
    engine.assert_empty()


def test_a_search_that_runs_is_not_fresh_again(batch: BatchFactory) -> None:
    engine = Engine(Shape(num_blocks=24, max_num_seqs=4), batch)
    beam = BeamParams(width=4)
    engine.submit(Request(RequestId(1), (1, 2), SamplingParams(max_tokens=5, beam=beam)))
    engine.submit(Request(RequestId(2), (3, 4), SamplingParams(max_tokens=12), priority=-1))
    steps = 0
    while engine.scheduler.lives(RequestId(1)):
        engine.begin()
        assert not engine.scheduler.is_fresh(RequestId(1))
        engine.end()
        assert not engine.scheduler.is_fresh(RequestId(1))
        steps += 1
    assert steps >= 5


def test_what_goes_on_from_its_output_has_run(batch: BatchFactory) -> None:
    engine = Engine(Shape(), batch)
    request = Request(RequestId(1), (1, 2), SamplingParams(max_tokens=3), output_token_ids=(4,))
    engine.submit(request)
    assert not engine.scheduler.is_fresh(RequestId(1))


def test_misuse_is_a_bug(engine: Engine) -> None:
    scheduler: Scheduler = engine.scheduler
    with pytest.raises(AssertionError, match="no step is in flight"):
        scheduler.apply(StepResult(1, (0,)))
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
    with pytest.raises(AssertionError):
        scheduler.apply(StepResult(1, ()))
    with pytest.raises(AssertionError, match="token id 7 from the sampler"):
        scheduler.apply(StepResult(1, (VOCABULARY,)))
    stale = StepPlan(plan.step_id, plan.num_rows, plan.num_tokens, plan.num_samples, 1)
    with pytest.raises(AssertionError, match="only the step in flight"):
        scheduler.write(stale, engine.slot)
