import dataclasses
import math
from typing import Any

import pytest

from triptych.engine_core.errors import InvalidRequest
from triptych.engine_core.sampling_params import (
    MAX_EOS_TOKEN_IDS,
    MAX_SEED,
    MAX_STOP_TOKEN_IDS,
    BeamParams,
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
        ("typical_p", 1.5),
        ("typical_p", math.nan),
        ("top_n_sigma", -1.0),
        ("top_n_sigma", math.inf),
        ("presence_penalty", 2.5),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -2.5),
        ("frequency_penalty", math.inf),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", 101.0),
        ("repetition_penalty", math.nan),
        ("no_repeat_ngram_size", -1),
        ("logprobs", -2),
        ("prompt_logprobs", -2),
        ("n", 0),
        ("n", 129),
        ("allowed_token_ids", ()),
        ("logit_bias", tuple((i, 0.0) for i in range(1025))),
        ("logit_bias", ((2, 1.0), (1, 1.0))),
        ("logit_bias", ((1, 1.0), (1, 1.0))),
        ("bad_words", tuple((i,) for i in range(257))),
        ("processors", tuple((str(i), "") for i in range(9))),
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
        ("typical_p", 0.0),
        ("presence_penalty", -2.0),
        ("frequency_penalty", 2.0),
        ("repetition_penalty", 100.0),
        ("n", 128),
        ("logit_bias", ((0, -100.0), (3, 100.0))),
        ("seed", MAX_SEED),
        ("stop_token_ids", tuple(range(MAX_STOP_TOKEN_IDS))),
    ],
)
def test_bounds_are_inclusive(field: str, value: object) -> None:
    assert getattr(changed(field, value), field) == value


@pytest.mark.parametrize("bias", [-100.5, 100.5, math.nan, math.inf])
def test_a_bias_names_its_token(bias: float) -> None:
    with pytest.raises(InvalidRequest) as refused:
        changed("logit_bias", ((1, 0.0), (7, bias)))
    assert refused.value.field == "logit_bias[7]"


@pytest.mark.parametrize("word", [(), tuple(range(65))])
def test_a_bad_word_names_its_index(word: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        changed("bad_words", ((1,), word))
    assert refused.value.field == "bad_words[1]"


def test_beams_have_bounds() -> None:
    for fields, field in (
        ({"width": 1}, "beam_width"),
        ({"width": 65}, "beam_width"),
        ({"width": 2, "length_penalty": math.nan}, "length_penalty"),
        ({"width": 2, "early_stopping": "perhaps"}, "early_stopping"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            BeamParams(**fields)
        assert refused.value.field == field
    with pytest.raises(InvalidRequest, match="n: 3 is above beam_width 2"):
        SamplingParams(max_tokens=1, n=3, beam=BeamParams(width=2))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("repetition_penalty", 1.1),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("no_repeat_ngram_size", 2),
        ("logit_bias", ((1, 1.0),)),
        ("allowed_token_ids", (1,)),
        ("bad_words", ((1,),)),
        ("processors", (("a", ""),)),
    ],
)
def test_what_changes_logits_is_refused_beside_beams(field: str, value: Any) -> None:
    changed(field, value)
    with pytest.raises(InvalidRequest, match="beside beam search") as refused:
        SamplingParams(max_tokens=4, beam=BeamParams(width=2), **{field: value})
    assert refused.value.field == field
