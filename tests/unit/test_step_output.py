"""What a step's output says to requests."""

from array import array

import pytest

from triptych.engine_core.errors import Unavailable
from triptych.engine_core.ids import RequestId
from triptych.engine_core.step import Failed, PromptLogprobs, Started, StepOutput

REQUEST = RequestId(5)


@pytest.mark.parametrize(
    "output",
    [
        StepOutput(1, array("q", [5]), array("i", [7]), array("B", [0])),
        StepOutput(1, started=[Started(REQUEST, 0)]),
        StepOutput(1, prompt_logprobs=[PromptLogprobs(REQUEST, 0, [])]),
        StepOutput(1, failed=[Failed(REQUEST, Unavailable("gone"))]),
    ],
    ids=["token", "started", "prompt", "failed"],
)
def test_says_something(output: StepOutput) -> None:
    assert output.says_something


def test_says_nothing() -> None:
    assert not StepOutput(1).says_something
