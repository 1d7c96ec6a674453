"""Bounds of numbers: what is excluded is not let through, however the bounds come together."""

import json
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar_walks import accepts
from schema_grammars import grammar_of
from triptych.engine_core.errors import InvalidRequest
from triptych.services.tokenizer.structured_output.schema_numbers import BESIDE_ZERO
from triptych.services.tokenizer.structured_output.strict_json import Json

SPELLINGS = ("{}", "{}.0", "{}.00", "-{}", "-{}.0", "{}e0")


@pytest.mark.parametrize(
    ("schema", "excluded", "kept"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, 0, "0.5"),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.1}, 0, "0.000001"),
        ({"exclusiveMinimum": 1, "maximum": 1.5}, 1, "1.0000001"),
        ({"exclusiveMaximum": 0, "minimum": -0.5}, 0, "-0.5"),
        ({"exclusiveMaximum": 2, "minimum": 1.9}, 2, "1.99"),
        ({"exclusiveMinimum": True, "minimum": 0, "maximum": 0.5}, 0, "0.1"),
        ({"exclusiveMaximum": True, "maximum": 3, "minimum": 2.5}, 3, "2.5"),
        ({"exclusiveMinimum": 10000000000, "maximum": 10000000000.5}, 10000000000, None),
        ({"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]}, 0, "0.25"),
        ({"$ref": "#/$defs/a", "maximum": 0.5, "$defs": {"a": {"exclusiveMinimum": 0}}}, 0, "0.5"),
    ],
)
def test_a_whole_bound_beside_another(schema: Json, excluded: int, kept: str | None) -> None:
    assert isinstance(schema, dict)
    grammar = grammar_of({"type": "number", **schema})
    for spelling in SPELLINGS:
        assert not accepts(grammar, spelling.format(excluded)), spelling
    if kept is not None:
        assert accepts(grammar, kept)


def test_the_nearest_to_an_excluded_zero() -> None:
    grammar = grammar_of({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5})
    assert accepts(grammar, format(2 * BESIDE_ZERO, ".13f"))
    assert not accepts(grammar, format(BESIDE_ZERO / 2, ".13f"))


def test_other_bounds_are_kept_as_they_are() -> None:
    grammar = grammar_of({"type": "number", "exclusiveMinimum": 0, "maximum": 1})
    assert accepts(grammar, "0." + "0" * 30 + "1")


@pytest.mark.parametrize(
    ("schema", "kept", "lost"),
    [
        ({"type": "array", "minItems": 1.0, "maxItems": 2.0}, ["[1]", "[1,2]"], ["[]", "[1,2,3]"]),
        ({"type": "string", "minLength": 1.0, "maxLength": 1e300}, ['"a"'], ['""']),
        ({"type": "string", "maxLength": 1 << 64}, ['""', '"a"'], []),
        ({"type": "string", "minLength": 1e300}, [], ['""', '"a"']),
        ({"type": "object", "maxProperties": 0.0}, ["{}"], ['{"a":1}']),
    ],
)
def test_counts_are_numbers_of_json(schema: Json, kept: list[str], lost: list[str]) -> None:
    """1.0 is 1, and what is more than anybody can count to is as good as that."""
    grammar = grammar_of(schema)
    assert [text for text in kept if not accepts(grammar, text)] == []
    assert [text for text in lost if accepts(grammar, text)] == []


bounds = st.integers(-12, 12) | st.decimals(-3, 3, places=2).map(float)


@settings(max_examples=300, deadline=None)
@given(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["number", "integer"])},
        optional=dict.fromkeys(
            ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), bounds
        ),
    ),
    st.lists(st.integers(-1300, 1300), min_size=1, max_size=20),
)
def test_nothing_out_of_bounds(schema: dict[str, int | float | str], hundredths: list[int]) -> None:
    try:
        grammar = grammar_of(json.dumps(schema))
    except InvalidRequest:
        return  # no number is within
    limits = {name: Decimal(str(value)) for name, value in schema.items() if name != "type"}
    for value in [*limits.values(), *(Decimal(each) / 100 for each in hundredths)]:
        for text in {format(value, "f"), f"{value:.1f}", f"{value:.0f}", f"{value:.3f}"}:
            if accepts(grammar, text):
                number = Decimal(text)
                assert number >= limits.get("minimum", number), text
                assert number <= limits.get("maximum", number), text
                assert number > limits.get("exclusiveMinimum", number - 1), text
                assert number < limits.get("exclusiveMaximum", number + 1), text
