"""Somebody waits for blocks: that keeps no step from being planned ahead, until some come back."""

from dataclasses import replace

import pytest

from ahead_engine import AheadEngine
from core_engine import BatchFactory, Shape
from hash_model import expected_output
from triptych.engine_core.ids import RequestId
from triptych.engine_core.python_batch import PythonBatch
from triptych.engine_core.request import Request
from triptych.engine_core.sampling_params import SamplingParams
from triptych.kernels.core import Batch as NativeBatch

SHAPE = Shape(
    num_blocks=12, max_model_len=24, max_num_seqs=4, max_num_batched_tokens=16, prefix_caching=False
)


@pytest.fixture(params=[PythonBatch, NativeBatch], ids=["python", "native"])
def engine(request: pytest.FixtureRequest) -> AheadEngine:
    factory: BatchFactory = request.param
    return AheadEngine(SHAPE, factory)


def ask(number: int, prompt: int, max_tokens: int, priority: int = 0) -> Request:
    tokens = tuple((number + index) % 7 for index in range(prompt))
    return Request(RequestId(number), tokens, SamplingParams(max_tokens=max_tokens), priority)


def turn(engine: AheadEngine) -> bool:
    """A step ends, and the next is planned as a loop would; whether it was planned ahead."""
    if not engine.flights:
        assert engine.begin()
    planned = len(engine.flights) == 1 and bool(engine.begin_ahead())
    engine.scheduler.check()
    engine.end()
    engine.scheduler.check()
    return planned


def finish(engine: AheadEngine, *asked: Request) -> None:
    engine.run_to_empty()
    engine.assert_empty()
    for request in asked:
        assert engine.outputs[request.request_id] == expected_output(request)


def test_who_waits_for_blocks_holds_nobody_up(engine: AheadEngine) -> None:
    short, long, waits = ask(1, 10, 4), ask(2, 2, 12), ask(3, 14, 4)
    for request in (short, long, waits):
        engine.submit(request)
    turns = [turn(engine)]
    while RequestId(1) not in engine.endings:
        assert engine.scheduler.num_waiting == 1
        turns.append(turn(engine))
    assert turns.count(True) >= len(turns) - 2 > 0
    while engine.scheduler.num_waiting:  # its blocks came back: the first plain step has room
        turn(engine)
    assert RequestId(2) not in engine.endings
    finish(engine, short, long, waits)


def test_somebody_in_front_of_it_may_enter(engine: AheadEngine) -> None:
    runs, waits, first = ask(1, 8, 12), ask(2, 18, 4), ask(3, 2, 4, priority=-1)
    engine.submit(runs)
    turn(engine)
    engine.submit(waits)
    while not turn(engine):
        pass
    engine.submit(first)
    for _ in range(3):  # two steps may be in flight
        turn(engine)
    assert engine.scheduler.num_running == 2
    assert engine.outputs[RequestId(3)]
    finish(engine, runs, waits, first)


def test_one_that_gives_up_in_front_lets_the_next_one_in(engine: AheadEngine) -> None:
    runs, waits, behind = ask(1, 8, 14), ask(2, 18, 4), ask(3, 2, 4)
    for request in (runs, waits, behind):
        engine.submit(request)
    while not turn(engine):
        pass
    assert engine.scheduler.num_waiting == 2
    assert engine.abort(RequestId(2))
    for _ in range(3):
        turn(engine)
    assert engine.scheduler.num_running == 2
    finish(engine, runs, behind)


def test_whose_text_is_being_computed_may_enter_any_time() -> None:
    """It waits for no blocks, though somebody behind it does."""
    engine = AheadEngine(replace(SHAPE, prefix_caching=True), PythonBatch)
    stem = ask(1, 12, 9)
    engine.submit(stem)
    engine.submit(replace(stem, request_id=RequestId(2)))
    engine.submit(ask(3, 20, 2))
    assert engine.begin()
    assert engine.scheduler.num_waiting == 2
    assert not engine.begin_ahead()
    engine.end()
    assert engine.begin()
    assert engine.scheduler.num_running == 2
    finish(engine, stem)


@pytest.mark.parametrize("factory", [PythonBatch, NativeBatch], ids=["python", "native"])
def test_choices_that_wait_for_a_fork_need_no_blocks(factory: BatchFactory) -> None:
    """Their prompt takes several steps; somebody behind them finds no room."""
    engine = AheadEngine(replace(SHAPE, long_prefill_token_threshold=8), factory)
    forks = replace(ask(16, 18, 2), params=SamplingParams(max_tokens=2, n=2))
    waits = ask(3, 16, 2)
    engine.submit(forks)
    engine.submit(waits)
    assert engine.begin().num_tokens == 8, "a part of the prompt, with tokens to spare"
    assert engine.scheduler.num_waiting == 2
    assert not engine.begin_ahead()
    finish(engine, waits)
    assert [engine.outputs[RequestId(16 + index)] for index in range(2)] == [
        expected_output(forks, index) for index in range(2)
    ]
