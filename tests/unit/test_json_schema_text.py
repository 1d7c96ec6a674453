"""What JSON a schema lets through: blanks, escapes, order, closed objects, unions, long chains."""

import itertools
import json
from collections.abc import Sequence

import jsonschema
import pytest

from grammar_walks import accepts
from schema_grammars import STRING, grammar_of, refusal, said
from triptych.services.tokenizer.structured_output.strict_json import (
    Json,
)


@pytest.mark.parametrize("text", [r'"\u0041b"', r'"\ud83d\ude00"', r'"\ud83d"', r'"\/"'])
def test_what_need_not_be_escaped_is_not(text: str) -> None:
    """One way to write a character: what a name or a length is, is then no question."""
    assert not accepts(grammar_of(STRING), text)


@pytest.mark.parametrize("length", range(4))
@pytest.mark.parametrize(
    "text",
    [
        '""',
        '"a"',
        r'"\n"',
        r'"\"\\"',
        '"é"',
        '"😀"',
        '"😀a"',
        r'"\b\f"',
        r'"\t\r"',
        '"👩‍👧"',
    ],
)
def test_lengths_count_characters(text: str, length: int) -> None:
    """As jsonschema counts them: an escape is one, and so is what takes two units of UTF-16."""
    for keyword in ("maxLength", "minLength"):
        schema: dict[str, Json] = {"type": "string", keyword: length}
        valid = jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
        assert accepts(grammar_of(schema), text) == valid


def test_white_space_is_bounded() -> None:
    grammar = grammar_of({"type": "object"})
    for text in ('{"a":1}', '{ "a" : 1 }', '{\n  "a": 1\n}', "{\n" + " " * 16 + '"a":1}'):
        assert accepts(grammar, text)
    for text in (" {}", "{} ", "{}\n", '{  "a":1}', '{\n\n"a":1}', "{\n" + " " * 17 + '"a":1}'):
        assert not accepts(grammar, text)
    compact = grammar_of({"type": "object"}, compact=True)
    assert accepts(compact, '{"a":1}')
    assert not accepts(compact, '{"a": 1}')


def test_closed_objects() -> None:
    schema: Json = {
        "properties": {
            "a": {"type": "object", "properties": {"b": {}}},
            "c": {"type": "object", "additionalProperties": STRING},
            "d": {},
        }
    }
    grammar = grammar_of(schema, closed=True)
    assert accepts(grammar, said({"a": {"b": 1}, "c": {"x": "y"}, "d": {"z": 1}}))
    assert not accepts(grammar, said({"x": 1}))
    assert not accepts(grammar, said({"a": {"x": 1}}))
    assert accepts(grammar_of(schema), said({"a": {"x": 1}, "x": 1}))
    both: Json = {"properties": {"a": {}}, "allOf": [{"properties": {"b": {}}}]}
    assert "allOf at # beside properties" in refusal(both, closed=True)


def test_properties_keep_their_order() -> None:
    grammar = grammar_of({"properties": {"b": STRING, "a": STRING}, "required": ["a"]})
    assert accepts(grammar, said({"b": "x", "a": "y"}))
    assert not accepts(grammar, said({"a": "y", "b": "x"}))


def test_anything() -> None:
    either: Sequence[Json] = ({}, True)
    for schema in either:
        for text in ("1", '"a"', "null", "[]", '{"a":[true]}', "-1.5e3"):
            assert accepts(grammar_of(schema), text)


def animal(kind: str | int, **more: Json) -> Json:
    return {"type": "object", "properties": {"kind": {"const": kind}, **more}, "required": ["kind"]}


def test_unions_behind_references() -> None:
    """As pydantic writes a discriminated union."""
    union: Json = {
        "$defs": {
            "Cat": animal("cat", lives={"type": "integer"}),
            "Dog": animal("dog"),
            "Any": {"$ref": "#/$defs/Dog"},
        },
        "discriminator": {"propertyName": "kind"},
        "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Any"}, {"type": "null"}],
    }
    grammar = grammar_of(union)
    rights: Sequence[Json] = ({"kind": "cat", "lives": 9}, {"kind": "dog", "lives": "many"}, None)
    for right in rights:
        assert accepts(grammar, said(right))
    wrongs: Sequence[Json] = ({"kind": "cow"}, {"kind": "cat", "lives": "many"}, 1)
    for wrong in wrongs:
        assert not accepts(grammar, said(wrong))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (animal("cat"), animal("cat", a=STRING)),
        (animal(1), animal(1)),
        (animal("cat"), {"properties": {"kind": {"const": "dog"}}, "required": ["kind"]}),
        (animal("cat"), {"type": "object", "properties": {"kind": {"const": "dog"}}}),
        ({"type": "number"}, {"type": "integer"}),
        ({"enum": ["a", "b"]}, {"enum": ["b", "c"]}),
        (STRING, {}),
    ],
)
def test_unions_that_may_overlap_are_refused(one: Json, other: Json) -> None:
    either: Json = [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]
    union: Json = {"$defs": {"a": one, "b": other}, "oneOf": either}
    assert "oneOf is not supported" in refusal(union)


@pytest.mark.parametrize("step", [1, -1])
def test_long_chains_of_references_are_looked_at_in_either_order(step: int) -> None:
    names = [f"d{index}" for index in range(300)][::step]
    links: dict[str, Json] = {
        name: {"$ref": f"#/$defs/{after}"} for name, after in itertools.pairwise(names)
    }
    last: dict[str, Json] = {**links, names[-1]: STRING}
    chain: Json = {
        "$defs": {name: last[name] for name in sorted(last)},
        "$ref": f"#/$defs/{names[0]}",
    }
    assert accepts(grammar_of(chain), '"a"')
