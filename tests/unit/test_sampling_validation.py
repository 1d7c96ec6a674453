"""Every sampling field: its range, its default, and a refusal that names field, value and bound."""

import math
from typing import Any

import pytest

from triptych.engine_core.errors import InvalidRequest
from triptych.engine_core.sampling_params import (
    NO_LOGPROBS,
    BeamParams,
    ExternalSampler,
    SamplingParams,
)
from triptych.services.tokenizer.output_validation import MAX_HELD, check_held, output_params
from triptych.services.tokenizer.sampling_validation import sampling_params
from triptych.services.tokenizer.validation import OutputParams, ServedModel
from triptych.v1 import common_pb2

V, L = 100, 64
MODEL = ServedModel(("tiny",), V, L, L, (7,))
ALL = ServedModel(("tiny",), V, L, L, (7,), max_logprobs=-1)
MOST = {
    "temperature": (0.0, 100.0), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0), "typical_p": (0.0, 1.0),
    "top_n_sigma": (0.0, 1000.0), "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0), "repetition_penalty": (0.0, 100.0),
}  # fmt: skip


def one(field: str, value: object) -> dict[str, Any]:
    return {field: value}


def encode(word: str) -> list[int]:
    """A byte-level vocabulary with one piece: 99 is " cat"; 98 is "cat"."""
    pieces = {"cat": [98], " cat": [99]}
    return pieces.get(word, [ord(letter) % V for letter in word])


def valid(model: ServedModel = MODEL, *, echo: bool = False, **fields: Any) -> SamplingParams:
    raw = common_pb2.SamplingParams(**fields)
    output_params(raw, 0, model, 1)
    return sampling_params(raw, model, 1, encode, echo=echo)


def refusal(model: ServedModel = MODEL, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        valid(model, **fields)
    return caught.value


def test_every_float_field_is_tried() -> None:
    fields = common_pb2.SamplingParams.DESCRIPTOR.fields
    floats = {field.name for field in fields if field.type == field.TYPE_FLOAT}
    assert floats == set(MOST)


@pytest.mark.parametrize("field", MOST)
@pytest.mark.parametrize("bad", ["nan", "inf", "-inf", "below", "above"])
def test_floats_out_of_range(field: str, bad: str) -> None:
    low, high = MOST[field]
    value = {"below": low - 0.5, "above": high + 0.5}.get(bad) or float(bad)
    error = refusal(**one(field, value))
    assert error.field == f"sampling_params.{field}"
    assert f"{value:g}" in error.description


@pytest.mark.parametrize("field", MOST)
def test_floats_at_their_bounds(field: str) -> None:
    low, high = MOST[field]
    for value in (low or 1e-30, high):
        assert getattr(valid(**one(field, value)), field) == pytest.approx(value)


def test_a_repetition_penalty_of_0() -> None:
    assert refusal(repetition_penalty=0.0).field == "sampling_params.repetition_penalty"


def test_unset_is_off() -> None:
    assert valid() == SamplingParams(max_tokens=L, seed=1, stop_token_ids=(7,))


def test_an_ngram_longer_than_the_context_is_as_long() -> None:
    assert valid(no_repeat_ngram_size=3).no_repeat_ngram_size == 3
    assert valid(no_repeat_ngram_size=2**32 - 1).no_repeat_ngram_size == L


def test_logit_bias() -> None:
    assert valid(logit_bias={9: -100.0, 2: 0.3}).logit_bias == ((2, 0.3), (9, -100.0))


@pytest.mark.parametrize(
    ("bias", "field", "shown"),
    [
        ({V: 1.0}, f"logit_bias[{V}]", "not below vocabulary_size 100"),
        ({2**32 - 1: 1.0}, f"logit_bias[{2**32 - 1}]", "vocabulary_size"),
        ({3: 1e9}, "logit_bias[3]", "100"),
        ({3: math.nan}, "logit_bias[3]", "nan"),
        ({3: -math.inf}, "logit_bias[3]", "-inf"),
        ({3: -100.5}, "logit_bias[3]", "-100.5"),
        (dict.fromkeys(range(1025), 0.0), "logit_bias", "1025 entries, more than 1024"),
    ],
)
def test_logit_bias_out_of_bounds(bias: dict[int, float], field: str, shown: str) -> None:
    error = refusal(logit_bias=bias)
    assert error.field == f"sampling_params.{field}"
    assert shown in error.description


def ids(*values: int) -> common_pb2.TokenIds:
    return common_pb2.TokenIds(ids=values)


def test_allowed_token_ids() -> None:
    assert valid().allowed_token_ids is None
    assert valid(allowed_token_ids=ids(9, 3, 9)).allowed_token_ids == (3, 9)
    assert refusal(allowed_token_ids=ids()).field == "sampling_params.allowed_token_ids"
    assert "101 ids" in refusal(allowed_token_ids=ids(*[1] * (V + 1))).description
    error = refusal(allowed_token_ids=ids(1, V))
    assert error.field == "sampling_params.allowed_token_ids.ids[1]"


def test_bad_words_with_and_without_a_blank() -> None:
    assert valid(bad_words=["cat"]).bad_words == ((98,), (99,))
    assert valid(bad_words=[" cat"]).bad_words == ((98,), (99,))
    # One more token with the blank in front: the sequence without it forbids that too.
    assert valid(bad_words=["ab"]).bad_words == ((97, 98),)
    both = valid(bad_words=["cat"], bad_words_token_ids=[ids(1, 2), ids(98)])
    assert both.bad_words == ((98,), (99,), (1, 2))


@pytest.mark.parametrize(
    ("fields", "field", "shown"),
    [
        ({"bad_words": ["a", ""]}, "bad_words[1]", "empty or blank"),
        ({"bad_words": [" "]}, "bad_words[0]", "empty or blank"),
        ({"bad_words": ["a"] * 129}, "bad_words", "129 words, more than 128"),
        ({"bad_words": ["a" * 4097]}, "bad_words", "4097 bytes together, more than 4096"),
        ({"bad_words": ["a" * 65]}, "bad_words[0]", "more than 64 tokens"),
        ({"bad_words_token_ids": [ids()]}, "bad_words_token_ids[0]", "0 tokens"),
        ({"bad_words_token_ids": [ids(*[1] * 65)]}, "bad_words_token_ids[0]", "64"),
        ({"bad_words_token_ids": [ids(1), ids(1, V)]}, "bad_words_token_ids[1][1]", "vocabulary"),
        ({"bad_words_token_ids": [ids(1)] * 257}, "bad_words_token_ids", "257 sequences"),
    ],
)
def test_bad_words_out_of_bounds(fields: dict[str, Any], field: str, shown: str) -> None:
    error = refusal(**fields)
    assert error.field == f"sampling_params.{field}"
    assert shown in error.description


def test_bad_words_of_both_kinds_are_bounded_together() -> None:
    many = [ids(a, b) for a in range(16) for b in range(16)]
    assert len(valid(bad_words_token_ids=many).bad_words) == 256
    assert "257 sequences" in refusal(bad_words_token_ids=many, bad_words=["ab"]).description


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_logprobs(field: str) -> None:
    assert getattr(valid(), field) == NO_LOGPROBS
    for wished in (0, 1, 20):
        assert getattr(valid(**one(field, wished)), field) == wished
    for wished, shown in ((21, "max_logprobs 20"), (-1, "vocabulary of 100"), (-2, "below -1")):
        error = refusal(**one(field, wished))
        assert error.field == f"sampling_params.{field}"
        assert shown in error.description
    for wished in (-1, 100, 1000):
        assert getattr(valid(ALL, **one(field, wished)), field) == V


def test_echo_reports_the_prompt_too() -> None:
    assert valid(echo=True, logprobs=3).prompt_logprobs == 3
    assert valid(echo=True, logprobs=3, prompt_logprobs=5).prompt_logprobs == 5
    assert valid(echo=True).prompt_logprobs == NO_LOGPROBS
    assert valid(echo=False, logprobs=3).prompt_logprobs == NO_LOGPROBS


def test_choices() -> None:
    assert valid(n=128).n == 128
    params = valid(n=2, best_of=5)
    assert (params.n, params.logprobs) == (5, 0)
    assert valid(n=2, best_of=5, logprobs=4).logprobs == 4
    assert valid(n=2, best_of=2).logprobs == NO_LOGPROBS
    assert refusal(n=0).field == refusal(n=129).field == "sampling_params.n"
    for best_of in (0, 2, 129):
        assert refusal(n=3, best_of=best_of).field == "sampling_params.best_of"


def beam(width: int, **fields: Any) -> common_pb2.BeamSearch:
    return common_pb2.BeamSearch(width=width, **fields)


def test_beam_search() -> None:
    assert valid(beam=beam(4)).beam == BeamParams(width=4)
    never = beam(2, length_penalty=0.0, early_stopping=common_pb2.EARLY_STOPPING_NEVER)
    assert valid(beam=never, n=2, temperature=1.0, top_k=-1, seed=3).beam == BeamParams(
        width=2, length_penalty=0.0, early_stopping="never"
    )


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"beam": beam(1)}, "beam.width"),
        ({"beam": beam(65)}, "beam.width"),
        ({"beam": beam(2, length_penalty=math.nan)}, "beam.length_penalty"),
        ({"beam": beam(2, length_penalty=101.0)}, "beam.length_penalty"),
        ({"beam": beam(2, early_stopping=9)}, "beam.early_stopping"),
        ({"beam": beam(2), "n": 3}, "n"),
        ({"beam": beam(2), "best_of": 2}, "best_of"),
        ({"beam": beam(2), "temperature": 0.5}, "temperature"),
        ({"beam": beam(2), "temperature": math.nan}, "temperature"),
        ({"beam": beam(2), "top_k": 3}, "top_k"),
        ({"beam": beam(2), "top_p": 0.9}, "top_p"),
        ({"beam": beam(2), "min_p": 0.1}, "min_p"),
        ({"beam": beam(2), "typical_p": 0.9}, "typical_p"),
        ({"beam": beam(2), "top_n_sigma": 1.0}, "top_n_sigma"),
        ({"beam": beam(2), "stop": ["x"]}, "stop"),
        ({"beam": beam(2), "logprobs": 1}, "logprobs"),
    ],
)
def test_beam_search_refused(fields: dict[str, Any], field: str) -> None:
    assert refusal(**fields).field == f"sampling_params.{field}"


def outside(**fields: Any) -> dict[str, Any]:
    return {"external_sampler": common_pb2.ExternalSampler(lease=5, tag=6), **fields}


def test_an_external_sampler() -> None:
    """Values that ask for nothing pass, and whatever does not concern the draw."""
    who = ExternalSampler(lease=5, tag=6)
    plain = SamplingParams(max_tokens=L, seed=1, stop_token_ids=(7,), external=who)
    assert valid(**outside()) == plain
    harmless = outside(
        n=1, best_of=1, min_tokens=0, temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0,
        typical_p=1.0, top_n_sigma=0.0, repetition_penalty=1.0, presence_penalty=0.0,
        frequency_penalty=0.0, no_repeat_ngram_size=0,
    )  # fmt: skip
    assert valid(**harmless) == plain
    assert valid(**outside(top_k=0)) == plain
    rest = valid(
        **outside(
            seed=3, stop=["x"], stop_token_ids=[9], ignore_eos=True, max_tokens=4, prompt_logprobs=2
        ),
        echo=True,
    )
    assert (rest.external, rest.seed, rest.stop_token_ids) == (who, 3, (9,))
    assert (rest.max_tokens, rest.prompt_logprobs, rest.logprobs) == (4, 2, NO_LOGPROBS)


_BESIDE_EXTERNAL: dict[str, tuple[Any, str]] = {
    "n": (2, "2"),
    "best_of": (2, "2"),
    "min_tokens": (1, "1"),
    "temperature": (0.7, "0.7"),
    "top_k": (3, "3"),
    "top_p": (0.9, "0.9"),
    "min_p": (0.1, "0.1"),
    "typical_p": (0.9, "0.9"),
    "top_n_sigma": (1.0, "1.0"),
    "repetition_penalty": (1.1, "1.1"),
    "presence_penalty": (0.5, "0.5"),
    "frequency_penalty": (-0.5, "-0.5"),
    "no_repeat_ngram_size": (2, "2"),
    "logprobs": (0, "0"),
    "logit_bias": ({3: 1.0}, "1 entries"),
    "bad_words": (["cat"], "1 entries"),
    "bad_words_token_ids": ([common_pb2.TokenIds(ids=[1])] * 2, "2 entries"),
    "allowed_token_ids": (common_pb2.TokenIds(ids=[1, 2]), "it"),
    "logits_processors": ([common_pb2.LogitsProcessor(name="a")], "1 entries"),
    "structured_output": (common_pb2.StructuredOutput(json_object=True), "it"),
    "beam": (common_pb2.BeamSearch(width=2), "it"),
}


@pytest.mark.parametrize("field", _BESIDE_EXTERNAL)
def test_what_is_an_external_samplers_own_business(field: str) -> None:
    value, said = _BESIDE_EXTERNAL[field]
    error = refusal(**outside(**one(field, value)))
    assert error.field == f"sampling_params.{field}"
    assert error.description == f"{said} beside external_sampler, whose business that is"


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_a_temperature_that_nobody_uses_is_refused_too(value: float) -> None:
    assert refusal(**outside(temperature=value)).field == "sampling_params.temperature"


def test_every_field_is_an_external_samplers_business_or_the_engines() -> None:
    """A field that is new has to be put on one of the two sides."""
    engines = {
        "external_sampler", "max_tokens", "seed", "stop", "stop_token_ids", "ignore_eos",
        "include_stop_str_in_output", "skip_special_tokens", "prompt_logprobs",
    }  # fmt: skip
    fields = set(common_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
    assert fields == engines | set(_BESIDE_EXTERNAL)


def test_an_external_sampler_without_a_lease() -> None:
    error = refusal(external_sampler=common_pb2.ExternalSampler(tag=3))
    assert error.field == "sampling_params.external_sampler.lease"


def processor(name: str, argument: str = "") -> common_pb2.LogitsProcessor:
    return common_pb2.LogitsProcessor(name=name, argument=argument)


def test_logits_processors() -> None:
    given = [processor("a"), processor("b", '{"x": [1, 2.5, null]}')]
    assert valid(logits_processors=given).processors == (("a", ""), ("b", '{"x": [1, 2.5, null]}'))


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ([processor("a")] * 9, "logits_processors"),
        ([processor("")], "logits_processors[0].name"),
        ([processor("x" * 129)], "logits_processors[0].name"),
        ([processor("a"), processor("a", "{")], "logits_processors[1].argument"),
        ([processor("a", "NaN")], "logits_processors[0].argument"),
        ([processor("a", "-Infinity")], "logits_processors[0].argument"),
        ([processor("a", "[" * 4000)], "logits_processors[0].argument"),
        ([processor("a", "1" * 4097)], "logits_processors[0].argument"),
    ],
)
def test_logits_processors_refused(given: list[common_pb2.LogitsProcessor], field: str) -> None:
    assert refusal(logits_processors=given).field == f"sampling_params.{field}"


def test_what_is_held_back_is_bounded() -> None:
    held = OutputParams(n=1, best_of=4, logprobs=1)
    check_held(held, MODEL, 5, MAX_HELD // 8)
    with pytest.raises(InvalidRequest, match=r"sampling_params\.best_of: best_of 4 x max_tokens"):
        check_held(held, MODEL, 5, MAX_HELD // 8 + 1)
    check_held(OutputParams(n=4, best_of=4, logprobs=1), MODEL, 5, MAX_HELD)
    with pytest.raises(InvalidRequest, match=r"sampling_params\.logprobs: 128 choices make"):
        check_held(OutputParams(n=128, best_of=128, logprobs=4097), MODEL, 5, 1)
    asked = OutputParams(prompt_logprobs=-1)
    check_held(asked, MODEL, MAX_HELD // V, 1)
    with pytest.raises(InvalidRequest, match=r"sampling_params\.prompt_logprobs: a prompt of"):
        check_held(asked, MODEL, MAX_HELD // V + 1, 1)
    with pytest.raises(InvalidRequest, match=r"sampling_params\.logprobs"):
        check_held(OutputParams(echo=True, logprobs=20), MODEL, MAX_HELD // 20 + 1, 1)
    echoed = OutputParams(echo=True, n=4, best_of=4, logprobs=16)  # each choice repeats the prompt
    check_held(echoed, MODEL, MAX_HELD // 64, 1)
    with pytest.raises(InvalidRequest, match="a prompt of 65537 tokens makes 4194368 "):
        check_held(echoed, MODEL, MAX_HELD // 64 + 1, 1)
