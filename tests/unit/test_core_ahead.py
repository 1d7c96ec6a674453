"""When the scheduler plans a step ahead, and what becomes of it."""

import pytest

from ahead_engine import AheadEngine
from core_engine import BatchFactory, Shape
from hash_model import expected_output
from triptych.engine_core.errors import Unavailable
from triptych.engine_core.ids import RequestId
from triptych.engine_core.python_batch import PythonBatch
from triptych.engine_core.request import Request
from triptych.engine_core.sampling_params import BeamParams, SamplingParams
from triptych.engine_core.step import FinishReason
from triptych.kernels.core import Batch as NativeBatch

SHAPE = Shape(num_blocks=64, max_model_len=40, max_num_seqs=4, max_num_batched_tokens=16)


@pytest.fixture(params=[PythonBatch, NativeBatch], ids=["python", "native"])
def batch(request: pytest.FixtureRequest) -> BatchFactory:
    factory: BatchFactory = request.param
    return factory


@pytest.fixture
def engine(batch: BatchFactory) -> AheadEngine:
    return AheadEngine(SHAPE, batch)


def ask(number: int, prompt: int = 3, **params: object) -> Request:
    tokens = tuple((number + index) % 7 for index in range(prompt))
    chosen = SamplingParams(**{"max_tokens": 8, **params})  # type: ignore[arg-type]  # by name
    return Request(RequestId(number), tokens, chosen)


def run(engine: AheadEngine, *asked: Request) -> None:
    """To the end; everybody got what is theirs."""
    engine.run_to_empty()
    engine.assert_empty()
    for request in asked:
        for index, request_id in enumerate(request.choices()):
            assert engine.outputs[request_id] == expected_output(request, index)


def test_decoding_is_planned_ahead_to_the_end(engine: AheadEngine) -> None:
    asked = [ask(1), ask(2, max_tokens=5)]
    for request in asked:
        engine.submit(request)
    run(engine, *asked)
    assert engine.aheads == 7, "each step but the first"
    assert engine.wasted == 0, "whoever ends with its last token has no row ahead"


def test_a_stop_token_costs_one_token(engine: AheadEngine) -> None:
    first = expected_output(ask(1))[0]
    asked = [ask(1, stop_token_ids=(first,)), ask(2)]
    for request in asked:
        engine.submit(request)
    run(engine, *asked)
    assert engine.endings[RequestId(1)] is FinishReason.STOP
    assert engine.wasted == 1


def test_somebody_who_can_enter_makes_the_next_turn_a_plain_one(engine: AheadEngine) -> None:
    engine.submit(ask(1))
    engine.begin()
    engine.submit(ask(2))
    assert not engine.begin_ahead()
    engine.end()
    assert engine.begin().num_rows == 2
    assert engine.begin_ahead()
    run(engine, ask(1), ask(2))


def test_who_waits_for_a_place_does_not(engine: AheadEngine) -> None:
    asked = [ask(number, max_tokens=4) for number in range(1, 7)]
    for request in asked:
        engine.submit(request)
    engine.begin()
    assert engine.scheduler.num_waiting == 2
    assert engine.begin_ahead()
    run(engine, *asked)


def test_choices_are_forked_in_a_plain_step_and_go_on_ahead(engine: AheadEngine) -> None:
    request = ask(16, prompt=5, n=3)
    engine.submit(request)
    plan = engine.begin()
    assert plan.num_samples == 3
    assert engine.begin_ahead().num_samples == 3
    run(engine, request)


def test_host_drawn_ones_have_a_row_every_other_step(engine: AheadEngine) -> None:
    engine.host_seed = 2  # every third sequence id from 1 on
    asked = [ask(1), ask(2)]
    for request in asked:
        engine.submit(request)
    engine.begin()
    assert engine.begin_ahead().num_rows == 1
    engine.end()
    assert engine.begin_ahead().num_rows == 2
    run(engine, *asked)


def test_beams_and_suspects_keep_to_plain_steps(engine: AheadEngine) -> None:
    engine.submit(ask(16, beam=BeamParams(width=2), max_tokens=3))
    engine.begin()
    assert not engine.begin_ahead()
    engine.run_to_empty()
    engine.submit(ask(1))
    engine.begin()
    engine.lose()
    engine.begin()
    assert engine.scheduler.suspects
    assert not engine.begin_ahead()
    run(engine, ask(1))


def test_no_step_ahead_where_blocks_lack_and_nobody_is_preempted(batch: BatchFactory) -> None:
    engine = AheadEngine(Shape(num_blocks=4, block_size=2, max_model_len=8), batch)
    asked = [ask(number, prompt=2, max_tokens=5) for number in (1, 2)]
    for request in asked:
        engine.submit(request)
    engine.begin()
    assert engine.begin_ahead()
    engine.end()
    assert engine.batch.num_free_blocks == 0
    while engine.begin_ahead():
        engine.end()
    assert engine.scheduler.num_running == 2
    run(engine, *asked)
    assert engine.scheduler.preemptions_total > 0


def test_abort_between_gives_everything_back_when_both_are_over(engine: AheadEngine) -> None:
    engine.submit(ask(1))
    engine.begin()
    engine.begin_ahead()
    assert engine.scheduler.abort(RequestId(1))
    assert engine.sampler.opened, "its samples may still be asked for"
    engine.end()
    assert engine.sampler.opened
    assert engine.batch.num_free_blocks < SHAPE.num_blocks
    engine.end()
    engine.assert_empty()
    assert engine.wasted == 2


def test_both_go_with_the_executor(engine: AheadEngine) -> None:
    asked = [ask(1), ask(2)]
    for request in asked:
        engine.submit(request)
    engine.begin()
    engine.begin_ahead()
    engine.lose()
    assert engine.batch.num_free_blocks == SHAPE.num_blocks
    assert engine.scheduler.suspects.request_ids() == {1, 2}
    run(engine, *asked)


def test_a_failed_step_takes_its_sequences_and_leaves_the_one_ahead(engine: AheadEngine) -> None:
    asked = [ask(1), ask(2)]
    engine.host_seed = 2
    for request in asked:
        engine.submit(request)
    engine.begin()
    engine.begin_ahead()  # without the second one
    engine.end()
    failing = engine.flights[0]
    failing.fails = True
    assert engine.begin_ahead().num_rows == 2
    engine.end()
    assert isinstance(engine.endings[RequestId(1)], Unavailable)
    assert RequestId(2) not in engine.endings
    assert len(engine.flights) == 1
    engine.scheduler.check()
    run(engine, ask(2))


def test_what_another_core_goes_on_from_is_known(engine: AheadEngine, batch: BatchFactory) -> None:
    engine.submit(ask(1))
    engine.begin()
    engine.begin_ahead()
    engine.end()
    (request,) = engine.scheduler.resumable()
    assert list(request.output_token_ids) == engine.outputs[RequestId(1)]
    assert len(request.output_token_ids) == 1


def test_out_of_turn(engine: AheadEngine) -> None:
    with pytest.raises(AssertionError, match="nothing to be ahead of"):
        engine.scheduler.plan_ahead()
    engine.submit(ask(1))
    first = engine.begin()
    second = engine.begin_ahead()
    assert second.step_id == first.step_id + 1
    with pytest.raises(AssertionError, match="two steps in flight"):
        engine.scheduler.plan_ahead()
    with pytest.raises(AssertionError):
        engine.scheduler.plan()
    with pytest.raises(AssertionError):
        engine.scheduler.write(first, engine.slot)
    run(engine, ask(1))
