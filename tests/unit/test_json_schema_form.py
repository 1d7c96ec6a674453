"""JSON Schemas: every keyword is kept or refused by name, at its place; nothing is dropped."""

import re
from collections.abc import Sequence
from pathlib import Path

import jsonschema
import pytest

from grammar_walks import accepts
from schema_grammars import STRING, Source, grammar_of, refusal, said
from triptych.services.tokenizer.structured_output.json_schema import MAX_PROPERTIES
from triptych.services.tokenizer.structured_output.schema_keywords import FORMATS
from triptych.services.tokenizer.structured_output.schema_keywords import (
    REFUSED as REFUSED_KEYWORDS,
)
from triptych.services.tokenizer.structured_output.strict_json import (
    MAX_JSON_BYTES,
    MAX_JSON_DEPTH,
    Json,
)

# --------------------------------------------------------------------------------- every keyword

KEPT: Sequence[tuple[Json, Json, Json]] = [
    # a schema, what matches it, what does not
    ({"type": "string"}, "a", 1),
    ({"type": ["string", "null"]}, None, 1),
    ({"enum": [1, "a", None]}, "a", 2),
    ({"const": {"a": [1]}}, {"a": [1]}, {"a": [2]}),
    ({"properties": {"a": STRING}}, {"a": "x"}, {"a": 1}),
    ({"required": ["a"]}, {"a": 1}, {}),
    ({"properties": {"a": True}, "additionalProperties": False}, {"a": 1}, {"b": 1}),
    ({"additionalProperties": STRING}, {"b": "x"}, {"b": 1}),
    ({"patternProperties": {"^a": STRING}}, {"ab": "x"}, {"ab": 1}),
    ({"type": "object", "minProperties": 1}, {"a": 1}, {}),
    ({"type": "object", "maxProperties": 1}, {"a": 1}, {"a": 1, "b": 2}),
    ({"items": STRING}, ["a"], [1]),
    ({"prefixItems": [STRING]}, ["a", 1], [1]),
    ({"prefixItems": [STRING], "items": False}, ["a"], ["a", 1]),
    ({"items": [STRING]}, ["a", 1], [1]),
    ({"items": [STRING], "additionalItems": False}, ["a"], ["a", 1]),
    ({"minItems": 1}, [1], []),
    ({"maxItems": 1}, [1], [1, 2]),
    ({"minLength": 2}, "ab", "a"),
    ({"maxLength": 1}, "a", "ab"),
    ({"pattern": "^a$"}, "a", "b"),
    ({"pattern": "a"}, "bab", "b"),
    ({"minimum": 3}, 3, 2),
    ({"maximum": 3}, 3, 4),
    ({"exclusiveMinimum": 3}, 4, 3),
    ({"exclusiveMaximum": 3}, 2, 3),
    ({"minimum": 3, "exclusiveMinimum": True}, 4, 3),
    ({"type": "integer", "multipleOf": 3}, 6, 4),
    ({"type": "number", "multipleOf": 0.5}, 1.5, 0.3),
    ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, 3, 2),
    ({"anyOf": [{"type": "integer"}, STRING]}, "a", None),
    ({"oneOf": [{"type": "integer"}, STRING]}, 1, 1.5),
    ({"$ref": "#/$defs/a", "$defs": {"a": STRING}}, "a", 1),
    ({"$ref": "#/definitions/a~1b", "definitions": {"a/b": STRING}}, "a", 1),
    ({"$ref": "#one", "$defs": {"a": {"$anchor": "one", "type": "string"}}}, "a", 1),
    ({"$ref": "#/x-mine/a", "x-mine": {"a": STRING}}, "a", 1),
    ({"format": "ipv4", "type": "string"}, "1.2.3.4", "1.2.3"),
]


@pytest.mark.parametrize(("schema", "right", "wrong"), KEPT)
def test_what_is_kept(schema: Json, right: Json, wrong: Json) -> None:
    grammar = grammar_of(schema)
    assert accepts(grammar, said(right))
    assert not accepts(grammar, said(wrong))


REFUSED: Sequence[Json] = [
    {"not": STRING},
    {"if": STRING},
    {"then": STRING},
    {"else": STRING},
    {"dependencies": {"a": ["b"]}},
    {"dependentRequired": {"a": ["b"]}},
    {"dependentSchemas": {"a": {}}},
    {"contains": {}},
    {"minContains": 1},
    {"maxContains": 1},
    {"propertyNames": STRING},
    {"unevaluatedItems": False},
    {"unevaluatedProperties": False},
    {"uniqueItems": True},
    {"$dynamicRef": "#a"},
    {"$dynamicAnchor": "a"},
    {"$recursiveRef": "#"},
    {"$recursiveAnchor": True},
    {"extends": STRING},
    {"disallow": "string"},
    {"divisibleBy": 2},
]


@pytest.mark.parametrize("keyword", REFUSED, ids=str)
def test_what_is_refused_is_named_with_its_place(keyword: Json) -> None:
    assert isinstance(keyword, dict)
    (name,) = keyword
    assert refusal(keyword) == f"{name} at # is not supported"
    deep: Json = {"properties": {"a/b": {"items": [{}, {"anyOf": [keyword]}]}}}
    assert refusal(deep) == f"{name} at #/properties/a~1b/items/1/anyOf/0 is not supported"
    behind: Json = {"$ref": "#/mine/0", "mine": [keyword]}
    assert refusal(behind) == f"{name} at #/mine/0 is not supported"
    assert accepts(grammar_of({"properties": {name: {"const": 1}}}), said({name: 1}))


def test_every_keyword_of_the_drafts_is_kept_refused_or_an_annotation() -> None:
    """By their own meta-schemas: none is overlooked."""
    annotations = {
        *("title", "description", "default", "examples", "$comment", "$vocabulary", "readOnly"),
        *("writeOnly", "deprecated", "contentEncoding", "contentMediaType", "contentSchema"),
        *("$schema", "$id", "id"),
    }
    kept = {name for schema, _, _ in KEPT if isinstance(schema, dict) for name in schema}
    refused = {name for schema in REFUSED if isinstance(schema, dict) for name in schema}
    for draft in (
        jsonschema.Draft4Validator,
        jsonschema.Draft6Validator,
        jsonschema.Draft7Validator,
    ):
        assert set(draft.META_SCHEMA["properties"]) <= kept | refused | annotations
    for validator in (jsonschema.Draft201909Validator, jsonschema.Draft202012Validator):
        known = set(validator.VALIDATORS) | set(validator.META_SCHEMA["properties"])
        assert known <= kept | refused | annotations | {"minContains", "maxContains"}


def test_the_documentation_lists_them_all() -> None:
    page = (Path(__file__).parents[2] / "docs" / "structured-output.md").read_text()
    rows = dict(re.findall(r"^\| ([a-z `]+) \| (.*) \|$", page, re.MULTILINE))
    kept = {name for schema, _, _ in KEPT if isinstance(schema, dict) for name in schema}
    assert set(re.findall(r"`(\$?\w+)`", rows["kept"])) >= kept - {"x-mine", "format"}
    assert set(re.findall(r"`(\$?\w+)`", rows["refused by name"])) == REFUSED_KEYWORDS | {
        *("uniqueItems", "$id")
    }
    assert set(re.findall(r"`([\w-]+)`", rows["`format`"])) == FORMATS | {"int32"}


def test_annotations_and_unknown_keywords_pass() -> None:
    schema: dict[str, Json] = {
        "title": 3, "description": "d", "default": 1, "examples": [1], "$comment": "c",
        "readOnly": True, "deprecated": True, "x-mine": {"not": 1}, "nullable": True,
        "type": "string", "uniqueItems": False, "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": "http://example.org/a.json",
    }  # fmt: skip
    grammar = grammar_of(schema)
    assert accepts(grammar, '"a"')
    assert "title" not in grammar
    assert grammar_of({**schema, "title": "other"}) == grammar


def test_options_of_the_library_are_not_the_clients() -> None:
    schema: dict[str, Json] = {
        "x-guidance": {"lenient": True, "whitespace_pattern": " *"},
        "type": "object",
    }
    grammar = grammar_of(schema)
    assert not accepts(grammar, '{  "a":1}')
    assert refusal({**schema, "uniqueItems": True}).startswith("uniqueItems")


# ------------------------------------------------------------------------------------ bad schemas

BAD: Sequence[tuple[Source, str]] = [
    ({"type": "something"}, "type at # must be one or several of array"),
    ({"type": True}, "type at # must be"),
    ({"type": []}, "type at # must be"),
    ({"pattern": "("}, "unclosed group"),
    ({"pattern": "(?<=a)b"}, "look-around"),
    ({"pattern": 3}, "pattern at # must be a string"),
    ({"properties": []}, "properties at # must be an object of schemas"),
    ({"properties": {"a": 3}}, "properties at # must be an object of schemas"),
    ({"items": 3}, "items at # must be a schema"),
    ({"required": "a"}, "required at # must be an array of names"),
    ({"properties": {"a": {"required": True}}}, "required at #/properties/a must be"),
    ({"enum": []}, "enum at # must be an array of at least one value"),
    ({"anyOf": []}, "anyOf at # must be an array of at least one schema"),
    ({"maxLength": -1}, "maxLength at # must be a whole number"),
    ({"minimum": "1"}, "minimum at # must be a number"),
    ({"multipleOf": 0}, "multipleOf at # must be a number above 0"),
    ({"format": "bogus"}, "format 'bogus' at # is not supported; date, date-time"),
    ({"type": "string", "format": "unknown"}, "format 'unknown' at # is not supported"),
    ({"minLength": 2, "maxLength": 1, "type": "string"}, "minLength (2) is greater"),
    ({"type": "integer", "minimum": 2, "maximum": 1}, "minimum (2) is greater"),
    ({"const": 1, "type": "string"}, "Unsatisfiable schema"),
    (
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        "oneOf is not supported where two of its schemas may match",
    ),
    (
        {"enum": [[index] for index in range(241)]},
        "enum at #: 241 arrays and objects, more than 240",
    ),
    ({"$schema": "http://example.org/mine"}, "$schema 'http://example.org/mine' at # is not"),
    ({"$ref": "http://example.org/a.json"}, "$ref http://example.org/a.json at # is not supported"),
    ({"$ref": "#/$defs/none"}, "$ref #/$defs/none at #: there is no schema there"),
    ({"$ref": "#none"}, "$ref #none at #: there is no such $anchor"),
    ({"properties": {"a": {"$id": "b"}}}, "$id at #/properties/a is not supported below the root"),
    ("", "it is empty"),
    ("  \n", "it is empty"),
    ("{", "it is no JSON: Expecting property name"),
    ("{} x", "it is no JSON: something follows at line 1, column 3"),
    ("'a'", "it is no JSON"),
    ("[]", "it must be an object"),
    ("false", "it must be an object"),
    ('{"type":"string","type":"object"}', "the name 'type' stands twice in one object"),
    ('{"const": NaN}', "NaN is no number of JSON"),
    ('{"minimum": 1e999}', "the number 1e999 is too large"),
    ('{"const": "\\ud800"}', "half of a surrogate pair"),
    ('{"const": ' + "9" * 5000 + "}", "is too large"),
    ({"const": 2**53 + 1}, "const at # has a number beyond"),
    ({"enum": [{"a": [-(2**63)]}]}, "enum at # has a number beyond"),
    ({"type": "integer", "minimum": 2**53 + 1}, "minimum 9007199254740993 at # is beyond"),
    ({"properties": {"\n": STRING}}, r"the property '\n' at # is not supported"),
    ({"type": "object", "minProperties": 2}, "minProperties 2 at # is not supported"),
]


@pytest.mark.parametrize(("schema", "why"), BAD, ids=lambda each: str(each)[:40])
def test_bad_schemas(schema: Source, why: str) -> None:
    assert why in refusal(schema)


# ----------------------------------------------------------------------------------------- bounds


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


def test_bounds() -> None:
    assert "arrays and objects in one another" in refusal(nested(5000))
    assert "arrays and objects in one another" in refusal("[" * 100_000)
    assert "arrays and objects in one another" in refusal(nested(MAX_JSON_DEPTH))
    assert accepts(grammar_of(nested(MAX_JSON_DEPTH - 1)), "[]")
    assert "bytes, more than" in refusal('{"title":"' + "x" * MAX_JSON_BYTES + '"}')
    names: list[Json] = [f"p{index}" for index in range(MAX_PROPERTIES + 1)]
    many: Json = {"properties": dict.fromkeys(map(str, names), True), "required": names}
    assert "properties at #: more than" in refusal(many)
    long: Json = {"enum": list(range(5001))}
    assert "enum at #: more than" in refusal(long)
    inner: Json = {"type": "object", "properties": {f"p{i}": {} for i in range(240)}}
    grammar = grammar_of({"properties": {"a": inner}, "required": ["a"]})
    assert accepts(grammar, said({"a": {f"p{i}": i for i in range(240)}}))
    assert accepts(grammar, said({"a": {"p239": 1}}))
    wide: Json = {"items": {"properties": {f"p{i}": {} for i in range(241)}}}
    assert "properties at #/items: 241 that are not required" in refusal(wide)
    schemas: Json = {"anyOf": [{} for _ in range(10_001)]}
    assert "more than 10000 schemas" in refusal(schemas)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$defs": {"A": {"$ref": "#/$defs/A"}}, "$ref": "#/$defs/A"},
        {"properties": {"a": {"$ref": "#/properties/b"}, "b": {"$ref": "#/properties/a"}}},
        {"allOf": [{"$ref": "#"}]},
        {"anyOf": [{"$ref": "#"}, {"$ref": "#/anyOf/0"}]},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1},
    ],
    ids=str,
)
def test_what_never_ends_is_refused(schema: Json) -> None:
    assert "no finite document matches it" in refusal(schema)


def test_legal_recursion() -> None:
    tree: Json = {
        "type": "object",
        "properties": {"left": {"$ref": "#"}, "v": {"type": "integer"}},
        "required": ["v"],
        "additionalProperties": False,
    }
    grammar = grammar_of(tree)
    assert accepts(grammar, said({"left": {"left": {"v": 1}, "v": 2}, "v": 3}))
    assert not accepts(grammar, said({"left": {"left": {}, "v": 2}, "v": 3}))
    either: Json = {"anyOf": [{"type": "array", "items": {"$ref": "#"}, "minItems": 1}, STRING]}
    assert accepts(grammar_of(either), said([["a"], "b"]))
    other: Json = {
        "type": ["object", "null"],
        "properties": {"a": {"$ref": "#"}},
        "required": ["a"],
    }
    assert accepts(grammar_of(other), said({"a": {"a": None}}))


def test_wide_bounds_of_integers_give_way_to_exact_ones() -> None:
    wide: Json = {"type": "integer", "minimum": -(2**63), "maximum": 2**64}
    grammar = grammar_of(wide)
    assert accepts(grammar, str(2**53))
    assert not accepts(grammar, str(2**53 + 1))
    assert accepts(grammar, str(-(2**53)))
