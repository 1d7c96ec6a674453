"""A JSON Schema as what llguidance reads: checked keyword by keyword, nothing dropped but
annotations.

llguidance refuses most of what it cannot keep, but not all: keywords of draft 3, numbers it would
round, `$id` beside `$ref`, `minProperties` where names repeat, and options of its own inside the
schema (`x-guidance`). What is refused here is named with the place where it stands.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from triptych.services.tokenizer.structured_output.quotable_patterns import quotable
from triptych.services.tokenizer.structured_output.refusal import Pointer, Refused, listed, shown
from triptych.services.tokenizer.structured_output.schema_formats import settle_format
from triptych.services.tokenizer.structured_output.schema_keywords import (
    ANNOTATIONS,
    FORMATS,
    LISTS_OF_SCHEMAS,
    MAPS_OF_SCHEMAS,
    REFUSED,
    SCHEMAS,
    SHAPES,
    is_dialect,
)
from triptych.services.tokenizer.structured_output.schema_numbers import (
    check_numbers,
    settle_bounds,
)
from triptych.services.tokenizer.structured_output.schema_references import (
    check_finite,
    local_path,
    target_of,
)
from triptych.services.tokenizer.structured_output.schema_unions import settle_one_of
from triptych.services.tokenizer.structured_output.strict_json import Json

MAX_SUBSCHEMAS = 10_000
MAX_PROPERTIES = 5_000
MAX_ENUM_VALUES = 5_000
MAX_ENUM_PARTS = 240
"""Arrays and objects in one enum: each is a way on, everywhere in front of it."""
MAX_FIXED_BYTES = 8 << 10
"""Of a string or a name that the schema spells out. To find what must follow takes 1 us a byte, at
once, and every mask within it another 0.05 us a byte, on the scheduler's step thread."""
MAX_OPTIONAL_PROPERTIES = 240
"""Of one object: each is a way on, everywhere in front of it (grammar_limits: max_items_in_row)."""

_OPTIONS = "x-guidance"
_ESCAPES = '"\\bfnrt'
"""Without \\u: names that the schema does not know would be let through in all spellings by it, and
`"\\u0061"` would be an unknown name where `"a"` is a property."""
_UNWRITTEN = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_OBJECT_KEYWORDS = frozenset({"properties", "patternProperties", "required"})
_COMBINING = ("allOf", "anyOf", "oneOf", "$ref")


@dataclass(frozen=True, slots=True)
class JsonText:
    """How JSON is written. `whitespace`: a regular expression for what may stand between its parts,
    "" for nothing. `closed`: objects that do not say so take no further properties."""

    whitespace: str = r" |\n {0,16}"
    closed: bool = False


def compiled_schema(schema: Json, text: JsonText) -> dict[str, Json]:
    """The schema as llguidance's `json_schema`. It takes over, and changes, the value given.

    Raises Refused with the keyword and its place.
    """
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise Refused("it is no schema that anything matches: it must be an object")
    checked = _Walk(schema, closed=text.closed)
    checked.run()
    options: dict[str, Json] = {"json_allowed_escapes": _ESCAPES}
    if text.whitespace:
        options["whitespace_pattern"] = text.whitespace
    else:
        options["whitespace_flexible"] = False
    return {**schema, _OPTIONS: options}


class _Walk:
    """One schema, every subschema once."""

    def __init__(self, root: dict[str, Json], *, closed: bool) -> None:
        self._root = root
        self._closed = closed
        self._schemas: dict[int, tuple[dict[str, Json], Pointer]] = {}
        self._anchors: dict[str, Json] = {}
        self._references: list[tuple[dict[str, Json], str, Pointer]] = []
        self._properties = 0
        self._enum_values = 0

    def run(self) -> None:
        self._dialect()
        self._walk([(self._root, Pointer())])
        targets: dict[int, Json] = {}
        for schema, reference, pointer in self._references:  # grows while it is walked
            targets[id(schema)] = self._resolved(reference, pointer)
        check_finite(self._schemas, targets)
        settle_bounds(schema for schema, _ in self._schemas.values())
        for schema, pointer in self._schemas.values():
            settle_one_of(schema, lambda behind: targets[id(behind)])
            _settle_patterns(schema, pointer)
            settle_format(schema)

    def _dialect(self) -> None:
        named = self._root.pop("$schema", None)
        if named is not None and not is_dialect(named):
            raise Refused(
                f"$schema {shown(repr(named))} at # is not supported: JSON Schema drafts 4, 6, 7,"
                " 2019-09 and 2020-12 are"
            )
        for name in ("$id", "id"):  # where references are within the schema, its name says nothing
            if isinstance(self._root.get(name), str):
                del self._root[name]

    def _resolved(self, reference: str, pointer: Pointer) -> Json:
        path = local_path(reference, pointer)
        if path is None:
            try:
                return self._anchors[reference.removeprefix("#")]
            except KeyError:
                raise Refused(
                    f"$ref {shown(reference)} at {pointer}: there is no such $anchor"
                ) from None
        target = target_of(self._root, path, reference, pointer)
        self._walk([(target, Pointer(tuple(path)))])  # it may stand where no schema is expected
        return target

    def _walk(self, waiting: list[tuple[Json, Pointer]]) -> None:
        while waiting:
            schema, pointer = waiting.pop()
            if not isinstance(schema, dict) or id(schema) in self._schemas:
                continue
            self._schemas[id(schema)] = (schema, pointer)
            if len(self._schemas) > MAX_SUBSCHEMAS:
                raise Refused(f"more than {MAX_SUBSCHEMAS} schemas in one another")
            self._check(schema, pointer)
            waiting.extend(reversed(list(_below(schema, pointer))))

    def _check(self, schema: dict[str, Json], pointer: Pointer) -> None:
        for keyword, value in list(schema.items()):
            if keyword in REFUSED:
                raise Refused(f"{shown(keyword)} at {pointer} is not supported")
            shape = SHAPES.get(keyword)
            if shape is not None and not shape[0](value):
                raise Refused(f"{keyword} at {pointer} must be {shape[1]}")
            if keyword in ANNOTATIONS or keyword == _OPTIONS:
                del schema[keyword]
        self._names(schema, pointer)
        self._count(schema, pointer)
        _check_unique_items(schema, pointer)
        _check_format(schema, pointer)
        check_numbers(schema, pointer)
        _check_texts(schema, pointer)
        _check_object(schema, pointer)
        if self._closed:
            _close(schema, pointer)

    def _names(self, schema: dict[str, Json], pointer: Pointer) -> None:
        for name in ("$id", "id"):
            if isinstance(schema.get(name), str):
                raise Refused(f"{name} at {pointer} is not supported below the root")
        if "$schema" in schema:
            raise Refused(f"$schema at {pointer} is not supported below the root")
        anchor, reference = schema.get("$anchor"), schema.get("$ref")
        if isinstance(anchor, str):
            if anchor in self._anchors:
                raise Refused(f"$anchor {shown(anchor)} at {pointer} is taken already")
            self._anchors[anchor] = schema
        if isinstance(reference, str):
            self._references.append((schema, reference, pointer))

    def _count(self, schema: dict[str, Json], pointer: Pointer) -> None:
        properties, enum = schema.get("properties", {}), schema.get("enum", [])
        if not isinstance(properties, dict) or not isinstance(enum, list):
            raise AssertionError("their shapes were checked")
        self._properties += len(properties)
        self._enum_values += len(enum)
        parts = [each for each in enum if isinstance(each, dict | list)]
        if len(parts) > MAX_ENUM_PARTS:
            raise Refused(
                f"enum at {pointer}: {len(parts)} arrays and objects, more than {MAX_ENUM_PARTS}"
            )
        if self._properties > MAX_PROPERTIES:
            raise Refused(f"properties at {pointer}: more than {MAX_PROPERTIES} altogether")
        if self._enum_values > MAX_ENUM_VALUES:
            raise Refused(f"enum at {pointer}: more than {MAX_ENUM_VALUES} values altogether")


def _below(schema: dict[str, Json], pointer: Pointer) -> Iterable[tuple[Json, Pointer]]:
    """The schemas of which a schema is made."""
    for keyword, value in schema.items():
        if keyword in SCHEMAS or (keyword == "items" and not isinstance(value, list)):
            yield value, pointer.down(keyword)
        elif (keyword in LISTS_OF_SCHEMAS or keyword == "items") and isinstance(value, list):
            yield from ((each, pointer.down(keyword, i)) for i, each in enumerate(value))
        elif keyword in MAPS_OF_SCHEMAS and isinstance(value, dict):
            yield from ((each, pointer.down(keyword, name)) for name, each in value.items())


def _check_unique_items(schema: dict[str, Json], pointer: Pointer) -> None:
    if schema.get("uniqueItems") is True:
        raise Refused(f"uniqueItems at {pointer} is not supported")
    schema.pop("uniqueItems", None)


def _check_format(schema: dict[str, Json], pointer: Pointer) -> None:
    """A format is of strings; where there are none (`"int32"`), it says nothing about the text."""
    if "format" not in schema:
        return
    kinds = schema.get("type", "string")
    if kinds != "string" and not (isinstance(kinds, list) and "string" in kinds):
        del schema["format"]
    elif schema["format"] not in FORMATS:
        raise Refused(
            f"format {shown(repr(schema['format']))} at {pointer} is not supported;"
            f" {listed(sorted(FORMATS))} are"
        )


def _check_texts(schema: dict[str, Json], pointer: Pointer) -> None:
    for keyword in ("const", "enum"):
        for text in _texts(schema.get(keyword)):
            if _UNWRITTEN.search(text):
                raise Refused(
                    f"{keyword} at {pointer} has a control character that is not written in strings"
                    " (all but \\b, \\f, \\n, \\r and \\t)"
                )
            _check_size(text, f"{keyword} at {pointer}")


def _texts(value: Json) -> Iterator[str]:
    """All strings and names of a value, each once for all alike."""
    waiting = [value]
    while waiting:
        match waiting.pop():
            case dict(each):
                yield from each
                waiting.extend(each.values())
            case list(each):
                waiting.extend(each)
            case str(each):
                yield each


def _check_size(text: str, where: str) -> None:
    size = len(text.encode())
    if size > MAX_FIXED_BYTES:
        raise Refused(f"{where}: a text of {size} bytes, more than {MAX_FIXED_BYTES}")


def _settle_patterns(schema: dict[str, Json], pointer: Pointer) -> None:
    """In place, when all references have been followed: they may name a pattern."""
    pattern, named = schema.get("pattern"), schema.get("patternProperties")
    if isinstance(pattern, str):
        schema["pattern"] = _quotable(pattern, pointer.down("pattern"))
    if isinstance(named, dict):
        place = pointer.down("patternProperties")
        schema["patternProperties"] = {
            _quotable(each, place.down(each)): value for each, value in named.items()
        }


def _quotable(pattern: str, place: Pointer) -> str:
    try:
        return quotable(pattern)
    except Refused as refused:
        raise Refused(f"{place}: {refused}") from refused


def _check_object(schema: dict[str, Json], pointer: Pointer) -> None:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise AssertionError("their shapes were checked")
    for name in (*properties, *(each for each in required if isinstance(each, str))):
        if any(ord(character) < 0x20 or character == "\x7f" for character in name):
            raise Refused(
                f"the property {shown(repr(name))} at {pointer} is not supported: it has a control"
                " character, which can be escaped in several ways"
            )
        _check_size(name, f"a property at {pointer}")
    optional = len(properties.keys() - {each for each in required if isinstance(each, str)})
    if optional > MAX_OPTIONAL_PROPERTIES:
        raise Refused(
            f"properties at {pointer}: {optional} that are not required, more than"
            f" {MAX_OPTIONAL_PROPERTIES}"
        )
    least = schema.get("minProperties", 0)
    if isinstance(least, int | float) and least > len(set(map(str, required))) + 1:
        raise Refused(
            f"minProperties {least} at {pointer} is not supported above the number of required"
            " properties and one more: other names may come twice"
        )


def _close(schema: dict[str, Json], pointer: Pointer) -> None:
    kinds = schema.get("type", [])
    objects = kinds == "object" or (isinstance(kinds, list) and "object" in kinds)
    if not (objects or _OBJECT_KEYWORDS & schema.keys()) or "additionalProperties" in schema:
        return
    combined = [keyword for keyword in _COMBINING if keyword in schema]
    if combined:
        raise Refused(
            f"{combined[0]} at {pointer} beside properties of the same object is not supported with"
            " disable_additional_properties: say additionalProperties in the schema"
        )
    schema["additionalProperties"] = False
