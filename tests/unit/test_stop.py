import pytest

from triptych.engine_core.sampling_params import SamplingParams
from triptych.engine_core.step import FinishReason
from triptych.engine_core.stop import banned_token_ids, finish_reason

PARAMS = SamplingParams(max_tokens=3, min_tokens=1, stop_token_ids=(5, 6))


@pytest.mark.parametrize(
    ("token_id", "num_output", "room", "reason"),
    [
        (1, 1, 9, None),
        (5, 1, 9, FinishReason.STOP),
        (6, 2, 9, FinishReason.STOP),
        (1, 3, 9, FinishReason.LENGTH),
        (1, 2, 0, FinishReason.LENGTH),
        (5, 3, 9, FinishReason.STOP),
        (5, 2, 0, FinishReason.STOP),
    ],
)
def test_finish_reason(
    token_id: int, num_output: int, room: int, reason: FinishReason | None
) -> None:
    assert finish_reason(PARAMS, token_id, num_output, room) is reason


def test_stop_ids_are_banned_until_min_tokens_are_out() -> None:
    assert banned_token_ids(PARAMS, 0) == (5, 6)
    assert banned_token_ids(PARAMS, 1) == ()
