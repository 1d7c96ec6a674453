"""What the benchmark of schemas asks for, and how it checks what came."""

import json
import random

import pytest

from bench_modules import load_bench_module
from triptych.services.tokenizer.structured_output.compilation import byte_matcher
from triptych.services.tokenizer.structured_output.wanted import wanted_grammar
from triptych.v1 import common_pb2

schemas = load_bench_module("schemas")
CASES = {
    "records": (schemas.records_schema(), schemas.records_document, schemas.is_person),
    "texts": (schemas.texts_schema(), schemas.texts_document, schemas.is_text),
}


@pytest.mark.parametrize("name", CASES)
def test_documents_are_of_their_schema(name: str) -> None:
    schema, document, valid = CASES[name]
    text = document(random.Random(1), schemas.ITEMS)
    items = json.loads(text)
    assert len(items) == schemas.ITEMS
    assert all(map(valid, items))
    grammar = wanted_grammar(common_pb2.StructuredOutput(json_schema=json.dumps(schema)))
    matcher = byte_matcher(grammar)
    assert matcher.consume_tokens(list(text.encode()))
    assert matcher.is_accepting()


def test_a_salt_makes_another_schema_of_the_same_kind() -> None:
    assert schemas.records_schema("_1") != schemas.records_schema("_2")
    assert len(schemas.records_schema("_1")["items"]["properties"]) == 4


@pytest.mark.parametrize(
    ("person", "valid"),
    [
        ({"name": "x", "age": 3, "tags": ["a"], "work": "sea"}, True),
        ({"age": 3, "name": "x", "tags": [], "work": "sea"}, False),  # not in the schema's order
        ({"name": "x", "age": True, "tags": [], "work": "sea"}, False),
        ({"name": "x" * 41, "age": 3, "tags": [], "work": "sea"}, False),
        ({"name": "x", "age": 3, "tags": ["a"] * 4, "work": "sea"}, False),
        ({"name": "x", "age": 3, "tags": [], "work": "air"}, False),
        ([], False),
    ],
)
def test_people_are_checked(person: object, valid: bool) -> None:
    assert schemas.is_person(person) is valid


@pytest.mark.parametrize("document", [schemas.records_document, schemas.texts_document])
def test_whole_items_of_a_text_that_breaks_off_anywhere(document: object) -> None:
    assert callable(document)
    text = document(random.Random(2), 3)
    items = json.loads(text)
    found = [schemas.whole_items(text[:end]) for end in range(1, len(text) + 1)]
    assert found[-1] == items
    assert all(part == items[: len(part)] for part in found)
    assert [len(part) for part in found] == sorted(len(part) for part in found)
    assert {len(part) for part in found} == {0, 1, 2, 3}


@pytest.mark.parametrize("text", ["", "{}", '["a" "b"]', '["a"}'])
def test_what_is_no_array_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"no array|no comma"):
        schemas.whole_items(text)
