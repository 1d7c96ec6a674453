"""Free output that is no JSON, and a model that would write blanks for ever: faults R40 and R42."""

import json
import re
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest

from engine import Engine, running_engine
from grpc_errors import as_error, violations
from scripted_models import T1_EOS, write_s1_markov
from small_engines import SMALL
from structured import asked, check_json, form, one_of, schema
from triptych.v1 import common_pb2

pytestmark = pytest.mark.e2e

V = 320
PROMPT = [ord("s")]
STOP = common_pb2.FINISH_REASON_STOP
LENGTH = common_pb2.FINISH_REASON_LENGTH


def table() -> npt.NDArray[np.float64]:
    """A blank at 0.9 everywhere; what closes things is less unlikely than all the rest."""
    row = np.full(V, 1.0)
    row[list(b'}]"')] = 20.0
    row[T1_EOS] = 5.0
    row[ord(" ")] = 0.0
    row *= 0.1 / row.sum()
    row[ord(" ")] = 0.9
    return np.tile(row, (V, 1))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("endings")
    write_s1_markov(folder / "model", table(), max_position_embeddings=1024)
    with running_engine(folder / "model", folder / "run", *SMALL) as engine:
        yield engine
        assert engine.wait_idle().grammars_running == 0


WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    *({"temperature": 1.0, "seed": seed} for seed in range(4)),
    {"temperature": 3.0, "seed": 9},
]


def test_the_free_output_is_no_json(engine: Engine) -> None:
    answer = engine.generate(PROMPT, max_tokens=200, temperature=0.0)
    assert answer.text == " " * 200


# ------------------------------------------------------------------ R40

WORD = {"type": "string", "maxLength": 6}
KEPT: list[object] = [
    {"type": "object", "properties": {"a": WORD, "b": {"type": "boolean"}},
     "required": ["a"], "additionalProperties": False},
    {"type": "array", "items": {"enum": [1, "two", None, [3], {"four": 4}]}, "maxItems": 4},
    {"type": "array", "prefixItems": [WORD, {"type": "null"}], "items": False, "minItems": 2},
    {"type": "integer", "minimum": -20, "maximum": 300, "multipleOf": 5},
    {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6},
    {"anyOf": [{"type": "boolean"}, {"const": {"x": [None]}}]},
    {"allOf": [{"maximum": 9, "minimum": 0}, {"type": "integer"}]},
    {"type": "string", "pattern": "^[a-f]{2,4}$"},
    {"type": "string", "pattern": r"^\d{3}-\w\u0041$"},
    {"type": "string", "pattern": '^"\\\\/\\n{1,2}$'},
    {"type": "string", "minLength": 3, "maxLength": 3},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": ["null", "boolean"]},
    {"type": "object", "patternProperties": {"^k[0-9]$": {"type": "null"}},
     "additionalProperties": False, "maxProperties": 2},
    {"$defs": {"leaf": {"type": "boolean"}}, "type": "array", "items": {"$ref": "#/$defs/leaf"},
     "minItems": 1, "maxItems": 3},
    {"oneOf": [{"type": "null"}, {"type": "integer", "minimum": 0, "maximum": 1}]},
]  # fmt: skip
ODD: list[object] = [
    {"type": "string", "pattern": r"\cA"},
    {"type": "string", "pattern": r"^\8$"},
    {"type": "string", "pattern": r"a\\\Q"},
    {"type": "string", "pattern": r"\p{Nothing}"},
    {"type": "string", "pattern": r"\ba"},
    {"type": "array", "uniqueItems": True},
    {"if": {"type": "string"}, "then": {"maxLength": 1}},
    {"not": {"type": "string"}},
    {"type": "array", "contains": {"type": "null"}},
    {"type": "object", "propertyNames": {"maxLength": 2}},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
    {"type": "string", "format": "no-such-format"},
    {"oneOf": [{"type": "integer"}, {"minimum": 3}]},
    {"enum": []},
    {"type": "integer", "minimum": 5, "maximum": 4},
    {"allOf": [{"type": "string"}, {"type": "null"}]},
]


@pytest.mark.parametrize("wanted", KEPT)
def test_r40_whatever_is_answered_is_valid(engine: Engine, wanted: dict[str, object]) -> None:
    for params in WAYS:
        answer = asked(engine, PROMPT, schema(wanted), max_tokens=200, **params)
        assert answer.finish[0] == STOP, answer.text[0]
        check_json(answer.text[0], wanted)


@pytest.mark.parametrize("wanted", ODD)
def test_r40_what_cannot_be_kept_is_refused(engine: Engine, wanted: dict[str, object]) -> None:
    for params in WAYS[:2]:
        with pytest.raises(grpc.RpcError) as caught:
            asked(engine, PROMPT, schema(wanted), max_tokens=50, **params)
        error = as_error(caught.value)
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert set(violations(error)) == {"sampling_params.structured_output.json_schema"}


# ------------------------------------------------------------------ R42


def test_r42_blanks_between_the_parts_are_bounded(engine: Engine) -> None:
    """At 0.9 a blank follows a blank for ever where it may."""
    wanted = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "null"}, "minItems": 3,
                             "maxItems": 3},
                       "b": {"type": "object", "additionalProperties": False}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }  # fmt: skip
    for params in WAYS:
        answer = asked(engine, PROMPT, schema(wanted), max_tokens=200, **params)
        assert answer.finish[0] == STOP
        check_json(answer.text[0], wanted)
        assert not re.search(r"(?<![\n ]) {2}| {17}|^\s|\s$", answer.text[0])


def test_r42_any_object(engine: Engine) -> None:
    answer = asked(engine, PROMPT, form(json_object=True), max_tokens=200, logit_bias={34: -100.0})
    assert (json.loads(answer.text[0]), answer.finish[0]) == ({}, STOP)
    ended = 0
    for seed in range(12):
        answer = asked(engine, PROMPT, form(json_object=True), max_tokens=200, seed=seed)
        if answer.finish[0] == STOP:  # else a string of blanks, which is as long as it likes
            assert isinstance(json.loads(answer.text[0]), dict)
            ended += 1
    assert ended > 6


@pytest.mark.parametrize(
    "value", ["yes", 42, True, None, {"a": [1, {"b": "c d"}]}, 'é/"\\', []], ids=repr
)
def test_r42_a_constant_is_its_own_length_and_ends_at_once(engine: Engine, value: object) -> None:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for params in (*WAYS[:3], {"ignore_eos": True}, {"min_tokens": 150}):
        answer = asked(
            engine, PROMPT, schema({"const": value}, disable_any_whitespace=True),
            max_tokens=200, **params,
        )  # fmt: skip
        assert (answer.text[0], answer.finish[0]) == (text, STOP)
        assert len(answer.ids[0]) == len(text.encode())
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(text.encode())


def test_r42_a_regex_that_may_go_on_offers_its_end(engine: Engine) -> None:
    lengths = set()
    for seed in range(16):
        answer = asked(engine, PROMPT, form(regex="a*"), max_tokens=200, seed=seed)
        assert answer.finish[0] == STOP
        assert answer.text[0] == "a" * len(answer.text[0])
        assert answer.ids[0] == [*b"a" * len(answer.text[0]), T1_EOS]
        lengths.add(len(answer.text[0]))
    assert 0 in lengths
    # Where the end is not wanted it does not come, and nothing else does.
    for never in ({"ignore_eos": True}, {"logit_bias": {T1_EOS: -100.0}}):
        answer = asked(engine, PROMPT, form(regex="a*"), max_tokens=30, **never)
        assert (answer.text[0], answer.finish[0]) == ("a" * 30, LENGTH)


def test_r42_min_tokens_holds_where_the_form_lets_it(engine: Engine) -> None:
    for seed in range(4):
        answer = asked(engine, PROMPT, form(regex="a*"), max_tokens=99, min_tokens=9, seed=seed)
        assert answer.finish[0] == STOP
        assert len(answer.ids[0]) >= 9
    bounded = asked(engine, PROMPT, form(regex="a{2,5}"), max_tokens=99, min_tokens=50, seed=1)
    assert (bounded.text[0], bounded.finish[0]) == ("aaaaa", STOP)
    bounded = asked(engine, PROMPT, form(regex="a{2,5}"), max_tokens=99, ignore_eos=True, seed=1)
    assert (bounded.text[0], bounded.finish[0]) == ("aaaaa", STOP)


def test_r42_any_value(engine: Engine) -> None:
    kinds = set()
    for seed in range(24):
        answer = asked(engine, PROMPT, schema({}), max_tokens=200, seed=seed)
        if answer.finish[0] == STOP:
            kinds.add(type(json.loads(answer.text[0])))
    assert len(kinds) > 2


def test_max_tokens_that_the_constant_just_takes(engine: Engine) -> None:
    wanted = schema({"const": "abc"})
    for most, text, finish in ((5, '"abc"', STOP), (4, '"abc', LENGTH), (1, '"', LENGTH)):
        answer = asked(engine, PROMPT, wanted, max_tokens=most)
        assert (answer.text[0], answer.finish[0]) == (text, finish)


def test_escapes_count_as_one_character(engine: Engine) -> None:
    wanted = {"type": "string", "minLength": 4, "maxLength": 4}
    escapes = 0
    for seed in range(8):
        params = {"seed": seed, "logit_bias": {ord("\\"): 9.0}}
        answer = asked(engine, PROMPT, schema(wanted), max_tokens=200, **params)
        assert answer.finish[0] == STOP
        check_json(answer.text[0], wanted)
        escapes += answer.text[0].count("\\")
    assert escapes > 8


def test_other_fields_that_leave_nothing_to_draw_say_so(engine: Engine) -> None:
    """A grammar and what else masks tokens can contradict each other: that request ends, named."""
    cases: list[dict[str, Any]] = [
        {"allowed_token_ids": {"ids": [ord("x")]}},
        {"bad_words_token_ids": [{"ids": [ord("y")]}]},
    ]
    for params in cases:
        with pytest.raises(grpc.RpcError) as caught:
            asked(engine, PROMPT, one_of("yes"), max_tokens=20, **params)
        error = as_error(caught.value)
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert violations(error)
    assert asked(engine, PROMPT, one_of("yes"), max_tokens=20).text[0] == "yes"
