"""Calls in Python's notation as a grammar. The values are JSON, which the parser reads as well."""

import json
import keyword
from collections.abc import Sequence

from triptych.services.tokenizer.structured_output.strict_json import Json, written_json

_SIMPLE = frozenset(
    {
        "$schema", "$id", "title", "description", "type", "properties", "required",
        "additionalProperties", "$defs", "definitions",
    }
)  # fmt: skip
_SHARED = ("$defs", "definitions")


def python_calls(
    tools: Sequence[tuple[str, dict[str, Json]]], *, only_one: bool
) -> dict[str, Json]:
    """A list of calls as a structural tag's format.

    Arguments whose schema is that of a plain object are written by name; others as **{...}.
    """
    rules: list[str] = []
    for index, (name, schema) in enumerate(tools):
        arguments = _by_name(f"tool_{index}", schema, rules)
        if arguments is None:
            arguments = f'"**" %json {written_json(schema)}'
        rules.append(f'tool_{index}: {json.dumps(f"{name}(")} {arguments} ")"')
    more = "" if only_one else ' (", " call)*'
    start = [
        f'start: "[" call{more} "]"',
        f"call: {' | '.join(f'tool_{index}' for index in range(len(tools)))}",
    ]
    return {"type": "grammar", "grammar": "\n".join([*start, *rules, ""])}


def _by_name(prefix: str, schema: dict[str, Json], rules: list[str]) -> str | None:
    """Rules for name=value of the properties, in their order; the expression that uses them.

    None where names and values are not all that the schema says.
    """
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return None
    if schema.keys() - _SIMPLE or any(name not in properties for name in required):
        return None
    if not all(_can_be_named(name) for name in properties) or _refers_to_root(schema):
        return None
    shared = {name: schema[name] for name in _SHARED if name in schema}
    first, rest = '""', '""'
    for index, (name, value) in reversed(list(enumerate(properties.items()))):
        if not isinstance(value, dict):
            return None
        one = f"{prefix}_{index}"
        rules.append(f'{one}: "{name}=" %json {written_json({**shared, **value})}')
        rules.append(f"{one}_rest: {rest}")
        rules.append(f"{one}_first: {first}")
        written = f"{one} {one}_rest"
        if name in required:
            first, rest = written, f'", " {written}'
        else:
            first, rest = f"{written} | {one}_first", f'(", " {one})? {one}_rest'
    return f"({first})"


def _can_be_named(name: str) -> bool:
    return name.isascii() and name.isidentifier() and not keyword.iskeyword(name)


def _refers_to_root(value: Json) -> bool:
    """Whether a reference goes to a place that a property's own schema would not have."""
    if isinstance(value, list):
        return any(map(_refers_to_root, value))
    if not isinstance(value, dict):
        return False
    reference = value.get("$ref")
    places = tuple(f"#/{name}/" for name in _SHARED)
    if isinstance(reference, str) and not reference.startswith(places):
        return True
    return "$anchor" in value or any(map(_refers_to_root, value.values()))
