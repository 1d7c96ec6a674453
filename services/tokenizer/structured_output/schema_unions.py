"""`oneOf` as `anyOf`, where no document can match two of its schemas.

llguidance sees that for schemas that stand there; those behind a `$ref`, as pydantic writes
discriminated unions, are looked at here. What neither sees is refused.
"""

from collections.abc import Callable, Mapping
from itertools import combinations
from typing import TypeAlias

from triptych.services.tokenizer.structured_output.strict_json import Json, written_json

_MOST = 256
"""Alternatives that are compared, each with each."""

Target: TypeAlias = Callable[[dict[str, Json]], Json]


def settle_one_of(schema: dict[str, Json], target: Target) -> None:
    """Rename `oneOf` in place, keeping its place among the keywords: they are read in order.

    `target`: what the `$ref` of a schema refers to.
    """
    alternatives = schema.get("oneOf")
    if not isinstance(alternatives, list) or "anyOf" in schema or len(alternatives) > _MOST:
        return
    seen = [_resolved(each, target) for each in alternatives]
    if not all(_disjoint(one, other) for one, other in combinations(seen, 2)):
        return
    items = list(schema.items())
    schema.clear()
    schema.update((("anyOf" if name == "oneOf" else name), value) for name, value in items)


def _resolved(schema: Json, target: Target) -> Mapping[str, Json]:
    """A schema that whatever matches this one matches too: behind references, a few."""
    for _ in range(8):
        if not isinstance(schema, dict):
            return {}
        if "$ref" not in schema:
            return schema
        schema = target(schema)
    return {}


def _disjoint(one: Mapping[str, Json], other: Mapping[str, Json]) -> bool:
    kinds, others = _types(one), _types(other)
    if kinds is not None and others is not None and not kinds & others:
        return True
    if _apart(_values(one), _values(other)):
        return True
    if kinds != {"object"} or others != {"object"}:
        return False
    return any(
        _apart(_values(_property(one, name)), _values(_property(other, name)))
        for name in _required(one) & _required(other)
    )


def _types(schema: Mapping[str, Json]) -> set[str] | None:
    kinds = schema.get("type")
    if kinds is None:
        return None
    names = kinds if isinstance(kinds, list) else [kinds]
    known = {each for each in names if isinstance(each, str)}
    return known | {"integer"} if "number" in known else known


def _values(schema: "Json | Mapping[str, Json]") -> set[str] | None:
    """The texts of the values that can match; None where they are not told one by one."""
    if not isinstance(schema, Mapping):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
        return None  # of numbers, 1 and 1.0 are one
    return {written_json(each) for each in values}


def _apart(one: set[str] | None, other: set[str] | None) -> bool:
    return one is not None and other is not None and not one & other


def _property(schema: Mapping[str, Json], name: str) -> Json:
    properties = schema.get("properties")
    return properties.get(name) if isinstance(properties, dict) else None


def _required(schema: Mapping[str, Json]) -> set[str]:
    names = schema.get("required")
    return {each for each in names if isinstance(each, str)} if isinstance(names, list) else set()
