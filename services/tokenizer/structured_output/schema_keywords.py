"""The keywords of JSON Schema, drafts 4 to 2020-12 (and 3, to refuse what is its own): which are
kept, what their values look like, and which cannot be kept.

"Cannot" was tried, keyword by keyword, with an instance that violates it (llguidance 1.9):
tests/unit/test_json_schema_form.py tries it again.
"""

from collections.abc import Callable, Mapping

from triptych.services.tokenizer.structured_output.strict_json import Json

TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
DIALECTS = frozenset(
    {
        "http://json-schema.org/schema",
        "http://json-schema.org/draft-04/schema",
        "http://json-schema.org/draft-06/schema",
        "http://json-schema.org/draft-07/schema",
        "https://json-schema.org/draft/2019-09/schema",
        "https://json-schema.org/draft/2020-12/schema",
    }
)
"""What `$schema` may name, without its scheme's `s` and a last `#`: see `is_dialect`."""

REFUSED = frozenset(
    {
        *("not", "if", "then", "else"),
        *("dependencies", "dependentRequired", "dependentSchemas"),
        *("contains", "minContains", "maxContains", "unevaluatedItems"),
        *("propertyNames", "unevaluatedProperties"),
        *("$dynamicRef", "$recursiveRef", "$recursiveAnchor", "$dynamicAnchor"),
        *("extends", "disallow", "divisibleBy"),  # of draft 3
    }
)
ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "example", "examples", "$comment", "$vocabulary"),
        *("readOnly", "writeOnly", "deprecated", "contentEncoding", "contentMediaType"),
    }
)
"""Left out of the grammar, so that it is short and the same for the same meaning."""

SCHEMAS = frozenset({"additionalProperties", "additionalItems"})
LISTS_OF_SCHEMAS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
MAPS_OF_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
BOUNDS = {
    **dict.fromkeys(("minimum", "exclusiveMinimum"), -1),
    **dict.fromkeys(("maximum", "exclusiveMaximum"), 1),
}
"""Bounds of numbers, and the side of them where a wider bound may give way to a narrower one."""
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")


def is_schema(value: Json) -> bool:
    """Whether it has the shape of one."""
    return isinstance(value, dict | bool)


def is_number(value: Json) -> bool:
    """Python's bool is an int, JSON's is not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_dialect(value: Json) -> bool:
    """Whether a `$schema` names a draft that is read here."""
    if not isinstance(value, str):
        return False
    bare = value.removesuffix("#").rstrip("/")
    return bare in DIALECTS or bare.replace("https://", "http://", 1) in DIALECTS


def _is_count(value: Json) -> bool:
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return is_number(value) and whole and isinstance(value, int | float) and value >= 0


def _is_text(value: Json) -> bool:
    return isinstance(value, str)


def _is_texts(value: Json) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_type(value: Json) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(each, str) and each in TYPES for each in names)


def _is_items(value: Json) -> bool:
    return is_schema(value) or _is_schemas(value)


def _is_schemas(value: Json) -> bool:
    return isinstance(value, list) and all(map(is_schema, value))


def _is_some_schemas(value: Json) -> bool:
    return _is_schemas(value) and bool(value)


def _is_schema_map(value: Json) -> bool:
    return isinstance(value, dict) and all(map(is_schema, value.values()))


def _is_limit(value: Json) -> bool:
    return is_number(value) or isinstance(value, bool)


def _is_factor(value: Json) -> bool:
    return is_number(value) and isinstance(value, int | float) and value > 0


def _is_some_values(value: Json) -> bool:
    return isinstance(value, list) and bool(value)


_COUNT = (_is_count, "a whole number, at least 0")
_SCHEMA = (is_schema, "a schema: an object, true or false")
_SCHEMA_MAP = (_is_schema_map, "an object of schemas")
_SOME_SCHEMAS = (_is_some_schemas, "an array of at least one schema")
_NUMBER = (is_number, "a number")

SHAPES: Mapping[str, tuple[Callable[[Json], bool], str]] = {
    "type": (_is_type, f"one or several of {', '.join(sorted(TYPES))}"),
    "enum": (_is_some_values, "an array of at least one value"),
    "properties": _SCHEMA_MAP,
    "patternProperties": _SCHEMA_MAP,
    "$defs": _SCHEMA_MAP,
    "definitions": _SCHEMA_MAP,
    "additionalProperties": _SCHEMA,
    "additionalItems": _SCHEMA,
    "items": (_is_items, "a schema or an array of them"),
    "prefixItems": (_is_schemas, "an array of schemas"),
    "allOf": _SOME_SCHEMAS,
    "anyOf": _SOME_SCHEMAS,
    "oneOf": _SOME_SCHEMAS,
    "required": (_is_texts, "an array of names"),
    "pattern": (_is_text, "a string"),
    "format": (_is_text, "a string"),
    "$ref": (_is_text, "a string"),
    "$anchor": (_is_text, "a string"),
    "minimum": _NUMBER,
    "maximum": _NUMBER,
    "exclusiveMinimum": (_is_limit, "a number (in draft 4: true or false)"),
    "exclusiveMaximum": (_is_limit, "a number (in draft 4: true or false)"),
    "multipleOf": (_is_factor, "a number above 0"),
    "uniqueItems": (lambda value: isinstance(value, bool), "true or false"),
    **dict.fromkeys(COUNTS, _COUNT),
}
"""What the value of a keyword must be, and how that is said."""
