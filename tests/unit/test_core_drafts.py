"""What the scheduler does with guesses, over both batches."""

from collections.abc import Sequence

import pytest

from core_engine import BIG, BatchFactory, Engine, Shape, wish
from hash_model import HashSampler, Scored, expected_output
from triptych.engine_core.batch import UNKNOWN_DRAFT
from triptych.engine_core.errors import InvalidRequest, Unavailable
from triptych.engine_core.ids import RequestId
from triptych.engine_core.python_batch import PythonBatch
from triptych.engine_core.request import Request
from triptych.engine_core.sampling_params import BeamParams, SamplingParams
from triptych.engine_core.step import FinishReason, Logprobs, StepOutput, StepResult
from triptych.kernels.core import Batch as NativeBatch

NO_DRAFT = UNKNOWN_DRAFT - 1


class GuessingSampler(HashSampler):
    """Guesses what it is told to: sequence id -> tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.guesses: dict[int, list[int]] = {}
        self.asked = 0

    def drafts(self) -> list[tuple[int, list[int]]]:
        self.asked += 1
        return list(self.guesses.items())


class GuessingEngine(Engine):
    """An engine over a GuessingSampler."""

    def new_sampler(self) -> HashSampler:
        self.guessing = GuessingSampler()
        return self.guessing

    def guess(self, sequence_id: int, *token_ids: int) -> None:
        """For every step from now on."""
        self.guessing.guesses[sequence_id] = list(token_ids)

    def answer(
        self,
        *token_ids: int,
        complete: Sequence[int] = (),
        logprobs: dict[int, Logprobs] | None = None,
        errors: dict[int, InvalidRequest] | None = None,
    ) -> StepOutput:
        """Apply these tokens as drawn."""
        assert self.plan is not None
        result = StepResult(
            self.plan.step_id, token_ids, logprobs or {}, (), errors or {}, complete
        )
        output = self.scheduler.apply(result)
        self.sampler_tokens = {n: state.tokens for n, state in self.sampler.opened.items()}
        self.plan = None
        self.scheduler.check()
        return output


@pytest.fixture(params=[PythonBatch, NativeBatch], ids=["python", "native"])
def batch(request: pytest.FixtureRequest) -> BatchFactory:
    factory: BatchFactory = request.param
    return factory


@pytest.fixture
def engine(batch: BatchFactory) -> GuessingEngine:
    """Two requests of ten tokens, each with its first one out."""
    engine = GuessingEngine(BIG, batch)
    for number in (0, 1):
        engine.submit(wish(number, max_tokens=10))
    engine.begin()
    engine.answer(3, 4)
    return engine


def columns(output: StepOutput) -> list[tuple[int, int, int]]:
    return list(zip(output.request_ids, output.token_ids, output.finishes, strict=True))


def test_guesses_are_computed_and_taken(engine: GuessingEngine) -> None:
    engine.guess(1, 5, 6)
    plan = engine.begin()
    assert (plan.num_rows, plan.num_tokens, plan.num_samples, plan.num_logits) == (2, 4, 4, 4)
    assert engine.scheduler.samples()[0].tolist() == [0, 1, 1, 1]
    assert engine.scheduler.drafts().tolist() == [NO_DRAFT, 5, 6, NO_DRAFT]
    assert columns(engine.answer(0, 5, 6, 2)) == [(0, 0, 0), (1, 5, 0), (1, 6, 0), (1, 2, 0)]
    assert [tokens[2:] for tokens in engine.sampler_tokens.values()] == [[3, 0], [4, 5, 6, 2]]
    engine.begin()
    assert columns(engine.answer(0, 5, 2, -1)) == [(0, 0, 0), (1, 5, 0), (1, 2, 0)]
    assert engine.sampler_tokens[1][2:] == [4, 5, 6, 2, 5, 2]


def test_an_output_ends_where_it_is_complete(engine: GuessingEngine) -> None:
    engine.guess(0, 5, 6)
    engine.begin()
    output = engine.answer(5, 6, 2, 1, complete=[1])
    assert columns(output) == [(0, 5, 0), (0, 6, FinishReason.STOP), (1, 1, 0)]
    assert engine.scheduler.num_requests == 1


def test_logprobs_are_of_their_tokens(engine: GuessingEngine) -> None:
    """By sample index in a result, by entry in an output."""
    engine.guess(0, 5, 6)
    engine.begin()
    found: dict[int, Logprobs] = {n: Scored(-float(n), 1, [], []) for n in (0, 1, 3)}
    output = engine.answer(5, 1, -1, 2, logprobs=found)
    assert columns(output) == [(0, 5, 0), (0, 1, 0), (1, 2, 0)]
    assert output.logprobs == {0: found[0], 1: found[1], 2: found[3]}


def test_logprobs_beside_an_error(engine: GuessingEngine) -> None:
    engine.guess(0, 5, 6)
    engine.begin()
    error = InvalidRequest("structured_output", "nothing left to draw")
    found: dict[int, Logprobs] = {n: Scored(-float(n), 1, [], []) for n in (0, 3)}
    output = engine.answer(5, -1, -1, 2, logprobs=found, errors={1: error, 2: error})
    assert columns(output) == [(0, 5, 0), (1, 2, 0)]
    assert output.logprobs == {0: found[0], 1: found[3]}
    assert [(each.request_id, each.error) for each in output.failed] == [(0, error)]


def test_an_error_that_is_not_reached_is_none(engine: GuessingEngine) -> None:
    engine.guess(0, 5, 6)
    engine.begin()
    error = InvalidRequest("structured_output", "nothing left to draw")
    output = engine.answer(1, -1, -1, 2, errors={1: error})
    assert columns(output) == [(0, 1, 0), (1, 2, 0)]
    assert not output.failed


def test_aborted_in_flight(engine: GuessingEngine) -> None:
    engine.guess(0, 5, 6)
    engine.begin()
    assert engine.abort(RequestId(0))
    assert columns(engine.answer(5, 6, 1, 2)) == [(1, 2, 0)]
    assert list(engine.sampler.opened) == [1]


@pytest.mark.parametrize("ending", ["lost", "failed"])
def test_a_step_that_is_not_computed(engine: GuessingEngine, ending: str) -> None:
    engine.guess(0, 5, 6)
    engine.begin()
    if ending == "lost":
        engine.lose()
        engine.guessing.guesses.clear()
        engine.begin()
        assert set(engine.scheduler.drafts()) == {NO_DRAFT}
        assert columns(engine.answer(1)) == [(0, 1, 0)]  # suspects, one at a time
        engine.begin()
        assert columns(engine.answer(3, 2)) == [(0, 3, 0), (1, 2, 0)]
    else:
        engine.fail_step(Unavailable("it broke", 100))
        assert len(engine.endings) == 2
        assert engine.scheduler.num_requests == 0
        engine.assert_empty()


def test_who_is_not_guessed_for(batch: BatchFactory) -> None:
    """Ids that do not run, beams, and who has no output token yet."""
    engine = GuessingEngine(BIG, batch)
    beams = SamplingParams(max_tokens=4, beam=BeamParams(width=2))
    engine.submit(Request(RequestId(0), (1, 2), beams))
    engine.submit(Request(RequestId(100), (2, 3), SamplingParams(max_tokens=4)))
    for number in range(12):
        engine.guess(number, 1, 1)
    engine.begin()
    assert set(engine.scheduler.drafts()) == {NO_DRAFT}
    engine.guessing.guesses.clear()
    engine.run_to_empty()
    engine.assert_empty()


def test_a_guess_out_of_the_vocabulary_is_a_bug(engine: GuessingEngine) -> None:
    engine.guess(0, 1, 7)
    with pytest.raises(AssertionError, match="token id 7 was guessed"):
        engine.begin()


def test_unknown_drafts_are_filled_with_tokens(engine: GuessingEngine) -> None:
    engine.guess(0, 5, UNKNOWN_DRAFT)
    engine.begin()
    for wrong in ([], [1, 2], [-1], [7], [2**40]):
        with pytest.raises(ValueError, match="drafts: "):
            engine.scheduler.fill_drafts(wrong)
    engine.scheduler.fill_drafts([6])
    assert engine.scheduler.drafts().tolist() == [5, 6, NO_DRAFT, NO_DRAFT]
    assert len(columns(engine.answer(5, 6, 1, 2))) == 4


def test_newcomers_come_before_guesses(batch: BatchFactory) -> None:
    engine = GuessingEngine(Shape(num_blocks=32, max_num_batched_tokens=6, extra_logits=9), batch)
    engine.submit(wish(0, max_tokens=9))
    engine.begin()
    engine.end()
    engine.guess(0, 1, 2, 3, 4)
    engine.submit(wish(3, prompt=4))
    engine.begin()
    assert [tuple(row) for row in engine.batch.rows()] == [(0, 2, 2, True), (1, 0, 4, True)]
    engine.end()
    engine.begin()
    assert [tuple(row)[2] for row in engine.batch.rows()] == [5, 1]
    engine.end()
    engine.run_to_empty()
    assert engine.outputs[RequestId(0)] == expected_output(wish(0, max_tokens=9))


def test_who_waits_for_a_place_hinders_no_guesses(batch: BatchFactory) -> None:
    engine = GuessingEngine(Shape(max_num_seqs=1, extra_logits=9), batch)
    for number in (0, 1):
        engine.submit(wish(number, max_tokens=9))
    engine.begin()
    engine.end()
    engine.guess(0, 1, 2)
    assert engine.begin().num_tokens == 3
    assert engine.guessing.asked == 2
