"""Length penalties at their bounds: powers that no float64 holds."""

import math

import pytest

from core_engine import Engine, Shape
from hash_model import VOCABULARY
from triptych.engine_core.beam_search import BeamSearch
from triptych.engine_core.ids import RequestId
from triptych.engine_core.request import Request
from triptych.engine_core.sampling_params import BeamParams, EarlyStopping, SamplingParams

STOP = 0


@pytest.mark.parametrize("early_stopping", ["true", "false", "never"])
@pytest.mark.parametrize("length_penalty", [-100.0, 100.0])
def test_long_hypotheses_have_finite_scores(
    length_penalty: float, early_stopping: EarlyStopping
) -> None:
    params = BeamParams(width=2, length_penalty=length_penalty, early_stopping=early_stopping)
    search = BeamSearch(params, 3000, [STOP])
    steps = 0
    while not search.done:
        steps += 1
        likely = [-30.0, -0.001, -2.0] if steps < 2000 else [-0.01, -0.5, -2.0]
        ids = sorted(range(3), key=lambda token_id: -likely[token_id])
        logprobs = [likely[token_id] for token_id in ids]
        search.advance([(ids, logprobs) for _ in search.running])
    scores = [each.score for each in search.best(2)]
    assert len(scores) == 2
    assert all(map(math.isfinite, scores))
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("length_penalty", [-3.0, 0.0, 0.7, 1.0, 2.0])
def test_others_are_the_plain_quotient(length_penalty: float) -> None:
    search = BeamSearch(BeamParams(width=2, length_penalty=length_penalty), 5, [])
    while not search.done:
        search.advance([([1, 2], [-0.25, -3.0]) for _ in search.running])
    assert search.best(1)[0].score == -1.25 / 5**length_penalty


def test_what_goes_out_fits_float32() -> None:
    engine = Engine(Shape(num_blocks=64, max_num_seqs=2, max_model_len=60))
    beam = BeamParams(width=2, length_penalty=-100.0)
    engine.submit(Request(RequestId(1), (1,), SamplingParams(max_tokens=40, beam=beam)))
    scores: list[float] = []
    while engine.begin():
        scores += engine.end().scores.values()
    assert len(scores) == 1
    assert -3.5e38 < scores[0] < -1e30


def test_fewer_hypotheses_than_wanted_are_the_callers_fault() -> None:
    engine = Engine(Shape(num_blocks=24, max_num_seqs=4))
    beam = BeamParams(width=4)
    stops = tuple(range(VOCABULARY))  # nothing goes on, and the rest is banned
    params = SamplingParams(max_tokens=2, n=4, beam=beam, stop_token_ids=stops[:-1], min_tokens=2)
    engine.submit(Request(RequestId(1), (1, 2), params))
    engine.run_to_empty()
    assert {str(engine.endings[RequestId(1 + i)]) for i in range(1, 4)} == {
        "n: the beam search found fewer hypotheses"
    }
