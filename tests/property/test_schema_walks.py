"""Whatever a schema's grammar lets through, jsonschema finds valid: never open."""

import json
import random

import jsonschema
from hypothesis import event, given, settings
from hypothesis import strategies as st

from grammar_walks import DeadEnd, walk
from triptych.engine_core.errors import InvalidRequest
from triptych.services.tokenizer.structured_output.strict_json import Json
from triptych.services.tokenizer.structured_output.wanted import wanted_grammar
from triptych.v1 import common_pb2

NAMES = ("a", "b", "ab", "é", 'q"', "n/~", "")
WALKS = 3

names = st.sampled_from(NAMES)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-1000, 1000),
    st.floats(-1000, 1000).map(lambda value: round(value, 3)),
    st.text(max_size=4),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=2),
    max_leaves=4,
)


def some(**keywords: st.SearchStrategy[Json]) -> st.SearchStrategy[dict[str, Json]]:
    return st.fixed_dictionaries({}, optional=keywords)


def typed(kind: str, **keywords: st.SearchStrategy[Json]) -> st.SearchStrategy[dict[str, Json]]:
    bare = some(**keywords).map(lambda given: {"type": kind, **given})
    return bare | some(**keywords)


def low_and_high(low: str, high: str, most: int) -> dict[str, st.SearchStrategy[Json]]:
    return {low: st.integers(0, most // 2), high: st.integers(most // 2, most)}


texts = typed(
    "string",
    **low_and_high("minLength", "maxLength", 6),
    pattern=st.sampled_from(["^a", "b$", "[0-9]{2}", '^[a-c\\n"]*$', "x|y", "^[^0-9]+$", "."]),
    format=st.sampled_from(["date", "ipv4", "uuid", "email", "date-time", "ipv6"]),
)
whole = st.integers(-50, 50)
decimals = st.sampled_from([-2.5, -0.1, 0.0, 0.25, 3.75, 1e-3, 100.5])
numbers = typed(
    "number",
    minimum=whole | decimals,
    maximum=whole | decimals,
    exclusiveMinimum=whole,
    exclusiveMaximum=whole,
)
integers = typed(
    "integer",
    minimum=whole,
    maximum=whole,
    multipleOf=st.sampled_from([1, 2, 7, 10]),
    exclusiveMinimum=whole,
)


def within(inner: st.SearchStrategy[Json]) -> st.SearchStrategy[Json]:
    objects = typed(
        "object",
        properties=st.dictionaries(names, inner, max_size=3),
        required=st.lists(names, max_size=2, unique=True),
        additionalProperties=inner | st.booleans(),
        patternProperties=st.dictionaries(st.sampled_from(["^x", "z$"]), inner, max_size=1),
        **low_and_high("minProperties", "maxProperties", 3),
    )
    arrays = typed(
        "array",
        items=inner | st.booleans(),
        prefixItems=st.lists(inner, max_size=2),
        **low_and_high("minItems", "maxItems", 4),
    )
    several = st.lists(inner, min_size=1, max_size=2)
    combined = some(anyOf=several, oneOf=several, allOf=several)
    return objects | arrays | combined


leaves = st.one_of(
    texts,
    numbers,
    integers,
    st.sampled_from(["boolean", "null"]).map(lambda kind: {"type": kind}),
    st.builds(lambda value: {"const": value}, values),
    st.builds(lambda several: {"enum": several}, st.lists(values, min_size=1, max_size=3)),
    st.lists(st.sampled_from(["string", "integer", "null", "array"]), min_size=1, unique=True).map(
        lambda kinds: {"type": kinds}
    ),
    st.just({"$ref": "#/$defs/tree"}),
    st.just({}),
)
TREE: Json = {
    "type": "object",
    "properties": {"next": {"$ref": "#/$defs/tree"}, "v": {"type": "integer", "maximum": 9}},
    "required": ["v"],
    "additionalProperties": False,
}


def with_tree(schema: Json) -> Json:
    assert isinstance(schema, dict)
    return {**schema, "$defs": {"tree": TREE}}


schemas = st.recursive(leaves, within, max_leaves=5).map(with_tree)


def grammar_of(schema: Json, *, disable_any_whitespace: bool) -> str:
    raw = common_pb2.StructuredOutput(
        json_schema=json.dumps(schema), disable_any_whitespace=disable_any_whitespace
    )
    return wanted_grammar(raw)


def valid(schema: Json, document: bytes) -> None:
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    validator.validate(json.loads(document))


@settings(max_examples=300, deadline=None)
@given(schemas, st.booleans(), st.integers(0, 2**32))
def test_nothing_invalid_gets_through(schema: Json, compact: bool, seed: int) -> None:
    try:
        grammar = grammar_of(schema, disable_any_whitespace=compact)
    except InvalidRequest:
        event("refused")
        return
    event("kept")
    for index in range(WALKS):
        try:
            document = walk(grammar, random.Random(seed + index))
        except DeadEnd:
            event("dead end")  # the request ends with an error: late, and yet not open
            return
        if document is None:
            event("without an end")
            continue
        valid(schema, document)
