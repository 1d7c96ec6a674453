"""What an executor says that it drew is taken only as it was asked for."""

from typing import Any

import numpy as np
import pytest

from triptych.services.scheduler.device_sampling import DeviceSamples
from triptych.services.scheduler.drawn_tokens import check_nothing_drawn, take_drawn
from triptych.v1 import stage_pb2

VOCABULARY = 50


def asked(drawn: list[bool], logprobs: list[int]) -> DeviceSamples:
    return DeviceSamples(np.array(drawn), np.array(logprobs, np.int32), VOCABULARY)


def told(**columns: Any) -> stage_pb2.DrawnTokens:
    """Columns as lists."""
    types = {"token_ids": "<i4", "logprobs": "<f4", "top_logprobs": "<f4"}
    return stage_pb2.DrawnTokens(
        **{
            name: np.array(values, types.get(name, "<u4")).tobytes()
            for name, values in columns.items()
        }
    )


ASKED = asked([True, False, True, True, True], [2, 5, -1, 0, 1])
TOLD: dict[str, list[Any]] = {
    "token_ids": [4, -1, 5, 6, -1],
    "logprobs": [-0.5, -1.0],
    "ranks": [1, 3],
    "top_counts": [2, 0],
    "top_ids": [4, 7],
    "top_logprobs": [-0.5, -1.5],
}


def test_tokens_and_logprobs() -> None:
    tokens, logprobs = take_drawn(told(**TOLD), ASKED)
    assert tokens == [4, -1, 5, 6, -1]
    assert list(logprobs) == [0, 3], "of those that ask for them and have a token"
    first, second = logprobs[0], logprobs[3]
    assert (first.logprob, first.rank) == (-0.5, 1)
    assert first.top_ids.tolist() == [4, 7]
    assert first.top_logprobs.tolist() == [-0.5, -1.5]
    assert (second.logprob, second.rank, len(second.top_ids)) == (-1.0, 3, 0)


def test_without_logprobs() -> None:
    tokens, logprobs = take_drawn(told(token_ids=[1, 2]), asked([True, True], [-1, -1]))
    assert (tokens, logprobs) == ([1, 2], {})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"token_ids": [4, -1, 5, 6]}, "token_ids: 16 bytes for 5 values"),
        ({"token_ids": [4, -1, 5, 6, -1, 1]}, "token_ids: 24 bytes for 5 values"),
        ({"token_ids": [4, 1, 5, 6, -1]}, "a token of a sample that is not the device's"),
        ({"token_ids": [4, -1, VOCABULARY, 6, -1]}, "token_ids: an id is not within -1 and 49"),
        ({"token_ids": [4, -1, -2, 6, -1]}, "token_ids: an id is not within -1 and 49"),
        ({"token_ids": [4, -1, 5, 6, 1]}, "logprobs: 8 bytes for 3 values"),
        ({"logprobs": [-0.5]}, "logprobs: 4 bytes for 2 values"),
        ({"ranks": [1, 2, 3]}, "ranks: 12 bytes for 2 values"),
        ({"ranks": [0, 2]}, "ranks: not within 1 and 50"),
        ({"ranks": [1, VOCABULARY + 1]}, "ranks: not within 1 and 50"),
        ({"top_counts": [2]}, "top_counts: 4 bytes for 2 values"),
        ({"top_counts": [3, 0]}, "top_counts: more tokens than were asked for"),
        ({"top_counts": [1, 1]}, "top_counts: more tokens than were asked for"),
        ({"top_counts": [1, 0]}, "top_ids: 8 bytes for 1 values"),
        ({"top_ids": [4]}, "top_ids: 4 bytes for 2 values"),
        ({"top_ids": [4, VOCABULARY]}, "top_ids: an id is not within 0 and 49"),
        ({"top_ids": [2**32 - 1, 1]}, "top_ids: an id is not within 0 and 49"),
        ({"top_logprobs": [-0.5]}, "top_logprobs: 4 bytes for 2 values"),
        ({"top_logprobs": [-0.5, float("nan")]}, "logprobs: one is not finite"),
        ({"logprobs": [-0.5, float("-inf")]}, "logprobs: one is not finite"),
    ],
    ids=str,
)
def test_contradictions(changed: dict[str, list[Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        take_drawn(told(**{**TOLD, **changed}), ASKED)


def test_torn_columns_are_refused() -> None:
    torn = told(**TOLD)
    torn.token_ids = torn.token_ids[:-1]
    with pytest.raises(ValueError, match="19 bytes for 5 values"):
        take_drawn(torn, ASKED)


def test_nothing_may_come_that_was_not_asked_for() -> None:
    check_nothing_drawn(stage_pb2.StepDone(step_id=3))
    check_nothing_drawn(stage_pb2.StepDone(drawn=stage_pb2.DrawnTokens()))
    with pytest.raises(ValueError, match="whose samples are not its own"):
        check_nothing_drawn(stage_pb2.StepDone(drawn=told(token_ids=[1])))
