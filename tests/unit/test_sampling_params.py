import dataclasses
import math

import pytest

from triptych.engine_core.errors import InvalidRequest
from triptych.engine_core.sampling_params import (
    MAX_EOS_TOKEN_IDS,
    MAX_SEED,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)

PLAIN = SamplingParams(max_tokens=4)


def changed(field: str, value: object) -> SamplingParams:
    fields = {**dataclasses.asdict(PLAIN), field: value}
    return SamplingParams(**fields)


def test_defaults_leave_the_distribution_alone() -> None:
    assert (PLAIN.temperature, PLAIN.top_k, PLAIN.top_p, PLAIN.min_p) == (1.0, 0, 1.0, 0.0)
    assert not PLAIN.greedy
    assert SamplingParams(max_tokens=1, temperature=0.0).greedy


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 5),
        ("temperature", -0.1),
        ("temperature", 100.5),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -2),
        ("top_p", 1.01),
        ("top_p", -0.5),
        ("top_p", math.nan),
        ("min_p", 1.5),
        ("min_p", math.nan),
        ("seed", -1),
        ("seed", MAX_SEED + 1),
        ("stop_token_ids", tuple(range(MAX_STOP_TOKEN_IDS + MAX_EOS_TOKEN_IDS + 1))),
    ],
)
def test_a_value_out_of_bounds_names_its_field(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        changed(field, value)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_tokens", 4),
        ("temperature", 100.0),
        ("top_k", -1),
        ("top_p", 0.0),
        ("min_p", 1.0),
        ("seed", MAX_SEED),
        ("stop_token_ids", tuple(range(MAX_STOP_TOKEN_IDS))),
    ],
)
def test_bounds_are_inclusive(field: str, value: object) -> None:
    assert getattr(changed(field, value), field) == value
