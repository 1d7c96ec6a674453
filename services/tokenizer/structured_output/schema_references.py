"""`$ref` within one schema, and schemas that no finite document satisfies.

A cycle of references alone says nothing (`{"$ref": "#"}`), and a cycle through required properties
would be written for ever: both are refused. Recursion that can end, a tree, is as legal as ever.
"""

from collections.abc import Iterable, Mapping
from urllib.parse import unquote

from triptych.services.tokenizer.structured_output.refusal import Pointer, Refused, shown
from triptych.services.tokenizer.structured_output.schema_keywords import is_schema
from triptych.services.tokenizer.structured_output.strict_json import Json

_SCALARS = frozenset({"string", "number", "integer", "boolean", "null"})


def local_path(reference: str, pointer: Pointer) -> list[str] | None:
    """The steps of a reference into this schema; None for an anchor. Raises Refused for others."""
    if not reference.startswith("#"):
        raise Refused(
            f"$ref {shown(reference)} at {pointer} is not supported: only references within the"
            " schema are, which begin with #"
        )
    fragment = unquote(reference[1:])
    if not fragment:
        return []
    if not fragment.startswith("/"):
        return None
    return [step.replace("~1", "/").replace("~0", "~") for step in fragment[1:].split("/")]


def target_of(root: Json, path: Iterable[str], reference: str, pointer: Pointer) -> Json:
    """The schema at the end of a path. Raises Refused where there is none."""
    target = root
    for step in path:
        if isinstance(target, dict) and step in target:
            target = target[step]
        elif isinstance(target, list) and step.isascii() and step.isdigit():
            index = int(step)
            if index >= len(target):
                raise _nowhere(reference, pointer)
            target = target[index]
        else:
            raise _nowhere(reference, pointer)
    if not is_schema(target):
        raise _nowhere(reference, pointer)
    return target


def check_finite(
    schemas: Mapping[int, tuple[dict[str, Json], Pointer]], targets: Mapping[int, Json]
) -> None:
    """`schemas`: every schema by identity; `targets`: what the `$ref` of each refers to.

    Raises Refused for the first that no finite document satisfies.
    """
    finite: set[int] = set()
    waiting = dict(schemas)
    grown, backwards = True, True
    while grown and waiting:
        grown = False
        entries = list(waiting.items())
        if backwards:  # and forwards in turn: long chains come in either order
            entries.reverse()
        backwards = not backwards
        for key, (schema, _) in entries:
            if _ends(schema, targets, finite):
                finite.add(key)
                del waiting[key]
                grown = True
    for schema, pointer in waiting.values():
        if _hopeless_alone(schema):
            continue  # `false` among its parts: the compiler says so better, if it matters at all
        what = "a cycle of references" if "$ref" in schema else "a recursion that never ends"
        raise Refused(f"{what} at {pointer}: no finite document matches it")


def _ends(schema: dict[str, Json], targets: Mapping[int, Json], finite: set[int]) -> bool:
    """Whether a document can match it, as far as that is known of its parts."""

    def known(part: Json) -> bool:
        return id(part) in finite if isinstance(part, dict) else part is not False

    if "const" in schema or "enum" in schema:
        return True
    if "$ref" in schema and not known(targets[id(schema)]):
        return False
    if not all(map(known, _parts(schema, "allOf"))):
        return False
    for either in ("anyOf", "oneOf"):
        if either in schema and not any(map(known, _parts(schema, either))):
            return False
    kinds = schema.get("type")
    names = set(kinds if isinstance(kinds, list) else [kinds]) if kinds is not None else _SCALARS
    if names & _SCALARS:
        return True
    return ("object" in names and all(map(known, _required(schema)))) or (
        "array" in names and all(map(known, _first_items(schema)))
    )


def _parts(schema: dict[str, Json], keyword: str) -> list[Json]:
    parts = schema.get(keyword, [])
    return parts if isinstance(parts, list) else []


def _required(schema: dict[str, Json]) -> Iterable[Json]:
    names, properties = schema.get("required", []), schema.get("properties", {})
    rest = schema.get("additionalProperties", True)
    if isinstance(names, list) and isinstance(properties, dict):
        for name in names:
            if isinstance(name, str):
                yield properties.get(name, rest)


def _first_items(schema: dict[str, Json]) -> Iterable[Json]:
    least = schema.get("minItems", 0)
    wanted = int(least) if isinstance(least, int | float) else 0
    items = schema.get("items", True)
    if isinstance(items, list):
        first, rest = items, schema.get("additionalItems", True)
    else:
        first, rest = _parts(schema, "prefixItems"), items
    yield from first[:wanted]
    if wanted > len(first):
        yield rest


def _hopeless_alone(schema: dict[str, Json]) -> bool:
    return any(
        part is False for keyword in ("allOf", "anyOf", "oneOf") for part in _parts(schema, keyword)
    ) or any(part is False for part in (*_required(schema), *_first_items(schema)))


def _nowhere(reference: str, pointer: Pointer) -> Refused:
    return Refused(f"$ref {shown(reference)} at {pointer}: there is no schema there")
