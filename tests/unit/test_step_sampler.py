"""The scheduler's sampler: plug-ins run on a copy of their row, and harm no other request."""

from collections.abc import Sequence
from importlib.metadata import EntryPoint
from typing import Literal

import numpy as np
import pytest

from triptych.engine_core.errors import InvalidRequest
from triptych.engine_core.sampling_params import ExternalSampler, SamplingParams
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.scheduler import logits_processors as module
from triptych.services.scheduler.logits_processors import LogitsProcessor, Row, load_processors
from triptych.services.scheduler.running_grammars import LAST
from triptych.services.scheduler.sampler import StepSampler, new_sampler

VOCABULARY = 8


def only(argument: str) -> LogitsProcessor:
    """Allows one token, which it is told; raises at the second output token if told to."""
    if not argument.isdigit():
        raise ValueError(f"{argument!r} is no token id")

    def process(prompt_ids: Sequence[int], output_ids: Sequence[int], logits: Row) -> None:
        assert tuple(prompt_ids) == (1, 2)
        if output_ids:
            raise RuntimeError("no more")
        logits[:] = -np.inf
        logits[int(argument)] = 0.0

    return process


class Moody:
    """A factory that raises what nobody told it to, at the calls named."""

    def __init__(self, *at: int) -> None:
        self._at, self._calls = at, 0

    def __call__(self, argument: str) -> LogitsProcessor:
        self._calls += 1
        if self._calls in self._at:
            raise KeyError(argument)
        return only("6")


def params(*processors: tuple[str, str]) -> SamplingParams:
    return SamplingParams(max_tokens=9, temperature=0.0, processors=processors)


@pytest.fixture(params=["native", "python"])
def sampler(request: pytest.FixtureRequest) -> StepSampler:
    inner = new_sampler(request.param, VOCABULARY, processed_logprobs=False)
    return StepSampler(inner, {"only": only})


def logits_of(*best: int) -> Row:
    rows = np.zeros((len(best), VOCABULARY), np.float32)
    rows[np.arange(len(best)), best] = 5.0
    rows.flags.writeable = False
    return rows


def test_a_row_is_processed_and_its_neighbours_are_not(sampler: StepSampler) -> None:
    for sequence_id, wanted in ((1, params()), (2, params(("only", "6"))), (3, params())):
        sampler.open(sequence_id, wanted, 0, (1, 2), ())
    drawn = sampler.draw(logits_of(3, 4, 5), [1, 2, 3], [0, 1, 2], [LAST] * 3)
    assert drawn.token_ids == [3, 6, 5]
    assert not drawn.errors


def test_a_row_that_is_drawn_outside_is_only_looked_at(sampler: StepSampler) -> None:
    """Greedily, and for no seed: what counts is whether the logits are finite."""
    outside = SamplingParams(max_tokens=9, external=ExternalSampler(lease=1))
    for sequence_id in (1, 2, 3):
        sampler.open(sequence_id, outside, 0, (1, 2), (3,))
    sampler.append([1, 2], [7, 7])
    logits = np.zeros((3, VOCABULARY), np.float32)
    logits[0, 3], logits[1, 5] = 0.01, np.nan
    drawn = sampler.draw(logits, [1, 2, 3], [0, 1, 2], [LAST] * 3)
    assert drawn.token_ids == [3, -1, 0]
    assert not drawn.errors
    assert not drawn.logprobs


def test_one_that_raises_ends_its_own_request(sampler: StepSampler) -> None:
    sampler.open(1, params(("only", "6")), 0, (1, 2), ())
    sampler.open(2, params(), 0, (1, 2), ())
    sampler.append([1], [6])
    drawn = sampler.draw(logits_of(3, 4), [1, 2], [0, 1], [LAST, LAST])
    assert drawn.token_ids == [-1, 4]
    assert {sample: str(error) for sample, error in drawn.errors.items()} == {
        0: "logits processor 'only' failed"
    }
    sampler.close(1)
    sampler.close(2)
    assert not sampler._processors


@pytest.mark.parametrize(
    ("processor", "field", "message"),
    [
        (("never", ""), "logits_processors[0].name", "'never' is not loaded; loaded: only"),
        (("only", "x"), "logits_processors[0].argument", "'x' is no token id"),
    ],
)
def test_unknown_names_and_bad_arguments_are_refused(
    sampler: StepSampler, processor: tuple[str, str], field: str, message: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        sampler.check(params(processor))
    assert (refused.value.field, refused.value.description) == (field, message)


@pytest.mark.parametrize("impl", ["native", "python"])
def test_a_factory_that_raises_anything_refuses_the_request(
    impl: Literal["native", "python"],
) -> None:
    inner = new_sampler(impl, VOCABULARY, processed_logprobs=False)
    sampler = StepSampler(inner, {"moody": Moody(1)})
    with pytest.raises(InvalidRequest) as refused:
        sampler.check(params(("moody", "{}")))
    assert refused.value.field == "logits_processors[0].argument"
    assert refused.value.description == "'moody' failed to take it (KeyError)"


@pytest.mark.parametrize("impl", ["native", "python"])
def test_a_factory_that_fails_later_ends_its_own_request(
    impl: Literal["native", "python"],
) -> None:
    inner = new_sampler(impl, VOCABULARY, processed_logprobs=False)
    sampler = StepSampler(inner, {"moody": Moody(2)})
    sampler.check(params(("moody", "")))
    sampler.open(1, params(("moody", "")), 0, (1, 2), ())
    sampler.open(2, params(), 0, (1, 2), ())
    drawn = sampler.draw(logits_of(3, 4), [1, 2], [0, 1], [LAST, LAST])
    assert drawn.token_ids == [-1, 4]
    assert list(drawn.errors) == [0]


def test_plug_ins_are_found_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_processors([]) == {}
    with pytest.raises(StartupError, match="'absent' is not installed; installed: none"):
        load_processors(["absent"])
    group = module.ENTRY_POINTS
    found = [
        EntryPoint("whole", "math:floor", group),
        EntryPoint("broken", "no_such_module:thing", group),
    ]
    monkeypatch.setattr(module, "entry_points", lambda group: found)
    assert list(load_processors(["whole"])) == ["whole"]
    with pytest.raises(StartupError, match="'broken' does not load"):
        load_processors(["broken"])
