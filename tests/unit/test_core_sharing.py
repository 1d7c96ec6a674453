"""What sequences share: cached prefixes, the prompt of several choices, the beams of a search."""

import pytest

from core_engine import BIG, BatchFactory, Engine, Shape, wish
from hash_model import expected_beams, expected_output
from triptych.engine_core.ids import RequestId
from triptych.engine_core.python_batch import PythonBatch
from triptych.engine_core.request import Request
from triptych.engine_core.sampling_params import BeamParams, SamplingParams
from triptych.kernels.core import Batch as NativeBatch


@pytest.fixture(params=[PythonBatch, NativeBatch], ids=["python", "native"])
def batch(request: pytest.FixtureRequest) -> BatchFactory:
    factory: BatchFactory = request.param
    return factory


# ---------------------------------------------------------------------------------- prefix cache


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 16, 17, 31, 32, 33])
def test_a_prompt_is_computed_once_but_for_its_last_token(batch: BatchFactory, length: int) -> None:
    engine = Engine(BIG, batch)
    for number in (1, 2):
        request = Request(RequestId(number), wish(1, length).prompt_token_ids, wish(1).params)
        engine.submit(request)
        engine.run_to_empty()
        assert engine.outputs[RequestId(number)] == expected_output(request)
    assert engine.cached == {1: 0, 2: length - 1}


def test_equal_prompts_that_come_together_are_computed_once(batch: BatchFactory) -> None:
    engine = Engine(BIG, batch)
    for number in range(8):
        engine.submit(Request(RequestId(number), (1, 2, 3, 4, 5, 6, 1), wish(1).params))
    engine.begin()
    assert [tuple(row) for row in engine.batch.rows()] == [(0, 0, 7, True)]
    engine.end()
    computed = engine.begin().num_tokens
    assert computed == 8  # a token for each
    engine.run_to_empty()
    assert [engine.cached[RequestId(number)] for number in range(8)] == [0, *[6] * 7]


def test_a_little_in_common_is_not_waited_for(batch: BatchFactory) -> None:
    engine = Engine(BIG, batch)
    engine.submit(Request(RequestId(1), (1, 2, 3, 4, 5, 6), wish(1).params))
    engine.submit(Request(RequestId(2), (1, 2, 4, 4, 5, 6), wish(1).params))
    assert engine.begin().num_rows == 2


def test_a_scored_prompt_takes_no_hits_and_leaves_some(batch: BatchFactory) -> None:
    engine = Engine(BIG, batch)
    for number, scored in enumerate((-1, 0, -1)):
        params = SamplingParams(max_tokens=2, prompt_logprobs=scored)
        engine.submit(Request(RequestId(number), (1, 2, 3, 4), params))
        engine.run_to_empty()
        if number == 0:
            engine.scheduler.forget_cache()
    assert engine.cached == {0: 0, 1: 0, 2: 3}


def test_other_salts_share_nothing(batch: BatchFactory) -> None:
    engine = Engine(BIG, batch)
    for number, salt in enumerate(("", "a", "b", "a")):
        engine.submit(Request(RequestId(number), (1, 2, 3, 4), wish(1).params, cache_salt=salt))
        engine.run_to_empty()
    assert engine.cached == {0: 0, 1: 0, 2: 0, 3: 3}


def test_a_forgotten_cache_is_not_hit(batch: BatchFactory) -> None:
    engine = Engine(BIG, batch)
    for number in range(2):
        engine.submit(Request(RequestId(number), (1, 2, 3, 4), wish(1).params))
        engine.run_to_empty()
        engine.scheduler.forget_cache()
    assert engine.cached == {0: 0, 1: 0}


# --------------------------------------------------------------------------------------- choices


def test_choices_share_the_prompt_and_nothing_else(batch: BatchFactory) -> None:
    engine = Engine(BIG, batch)
    request = Request(RequestId(10), (1, 2, 3), SamplingParams(max_tokens=9, n=5))
    engine.submit(request)
    plan = engine.begin()
    assert (plan.num_tokens, plan.num_samples, plan.num_logits) == (3, 5, 1)
    assert engine.batch.num_free_blocks == 62, "two blocks for all five"
    engine.run_to_empty()
    for index in range(5):
        assert engine.outputs[RequestId(10 + index)] == expected_output(request, index)
    assert engine.cached == {10: 0, 11: 2, 12: 2, 13: 2, 14: 2}
    engine.assert_empty()


@pytest.mark.parametrize("caching", [True, False])
def test_more_choices_than_places(batch: BatchFactory, caching: bool) -> None:
    shape = Shape(num_blocks=32, max_num_seqs=3, max_num_waiting=128, prefix_caching=caching)
    engine = Engine(shape, batch)
    request = Request(RequestId(0), (1, 2, 3), SamplingParams(max_tokens=4, n=128))
    engine.submit(request)
    engine.run_to_empty()
    for index in range(128):
        assert engine.outputs[RequestId(index)] == expected_output(request, index)


def test_one_choice_is_aborted_alone(batch: BatchFactory) -> None:
    engine = Engine(BIG, batch)
    engine.submit(Request(RequestId(0), (1, 2, 3), SamplingParams(max_tokens=4, n=3)))
    assert engine.abort(RequestId(0))  # the one that would have computed the prompt
    engine.begin()
    assert engine.abort(RequestId(1))  # the one that does
    engine.run_to_empty()
    assert set(engine.endings) == {2}
    engine.assert_empty()


# ----------------------------------------------------------------------------------------- beams


def test_beams_compete_for_one_prompt(batch: BatchFactory) -> None:
    engine = Engine(BIG, batch)
    beam = BeamParams(width=4)
    request = Request(RequestId(5), (1, 2, 3), SamplingParams(max_tokens=6, n=3, beam=beam))
    engine.submit(request)
    engine.run_to_empty()
    assert [engine.outputs[RequestId(5 + i)] for i in range(3)] == expected_beams(request)
    engine.assert_empty()


def test_beams_that_lack_blocks_take_turns(batch: BatchFactory) -> None:
    shape = Shape(num_blocks=12, max_num_seqs=6, max_num_batched_tokens=8)
    engine = Engine(shape, batch)
    beam = BeamParams(width=3)
    wishes = [
        Request(RequestId(16 * i), (i, 2), SamplingParams(max_tokens=4, n=2, beam=beam))
        for i in range(4)
    ]
    for request in wishes:
        engine.submit(request)
    engine.run_to_empty()
    for request in wishes:
        first = request.request_id
        assert [engine.outputs[RequestId(first + i)] for i in (0, 1)] == expected_beams(request)
    engine.assert_empty()


def test_beams_are_aborted_in_any_state(batch: BatchFactory) -> None:
    beam = BeamParams(width=3)
    for steps in range(5):
        for in_flight in (False, True):
            engine = Engine(BIG, batch)
            request = Request(RequestId(0), (1, 2), SamplingParams(max_tokens=9, n=2, beam=beam))
            engine.submit(request)
            for _ in range(steps):
                engine.begin()
                engine.end()
            if in_flight:
                engine.begin()
            assert engine.abort(RequestId(0))
            assert not engine.abort(RequestId(0))
            assert engine.abort(RequestId(1))
            engine.run_to_empty()
            assert not engine.endings
            engine.assert_empty()
