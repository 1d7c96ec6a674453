"""A pattern that does not compile is refused with its place in the document."""

import json

import pytest

from triptych.engine_core.errors import InvalidRequest
from triptych.services.tokenizer.structured_output.wanted import wanted_grammar
from triptych.v1 import common_pb2


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"pattern": "("}, "#/pattern: "),
        ({"properties": {"a": {}, "b/c": {"pattern": "(?=a)"}}}, "#/properties/b~1c/pattern: "),
        ({"patternProperties": {"a": {}, "(": {}}}, "#/patternProperties/(: "),
        (
            {"items": {"anyOf": [{"type": "null"}, {"pattern": "a{3,1}"}]}},
            "#/items/anyOf/1/pattern: ",
        ),
        (
            {"anyOf": [{"enum": [{"pattern": "("}]}, {"pattern": "a{3,1}"}]},
            "#/anyOf/1/pattern: ",
        ),
    ],
)
def test_the_place_is_named(schema: dict[str, object], place: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        wanted_grammar(common_pb2.StructuredOutput(json_schema=json.dumps(schema)))
    assert refused.value.description.startswith(place)


def test_in_a_structural_tag_too() -> None:
    tag = {
        "structures": [{"begin": "<a>", "schema": {"pattern": "("}, "end": "</a>"}],
        "triggers": ["<a"],
    }
    with pytest.raises(InvalidRequest, match="#/structures/0/schema/pattern: "):
        wanted_grammar(common_pb2.StructuredOutput(structural_tag=json.dumps(tag)))


def test_a_constant_is_no_schema() -> None:
    value = {"const": {"pattern": "("}}
    assert wanted_grammar(common_pb2.StructuredOutput(json_schema=json.dumps(value)))
