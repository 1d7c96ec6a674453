"""Numbers in schemas: those that llguidance (1.9) would round or read otherwise are refused, or
give way to narrower ones."""

import math
from bisect import bisect_right
from collections.abc import Iterable

from triptych.services.tokenizer.structured_output.refusal import Pointer, Refused
from triptych.services.tokenizer.structured_output.schema_keywords import BOUNDS, COUNTS, is_number
from triptych.services.tokenizer.structured_output.strict_json import Json

MOST_EXACT_INTEGER = 1 << 53
"""Up to here llguidance, and every other reader of JSON (RFC 8259, section 6), keeps integers."""
MOST_COUNT = (1 << 32) - 1
"""Of items, characters and properties: no document has so many."""
BESIDE_ZERO = 1e-12
"""The nearest that a number comes to an excluded 0, where `settle_bounds` says so."""

_EXCLUSIVE = {"minimum": "exclusiveMinimum", "maximum": "exclusiveMaximum"}


def check_numbers(schema: dict[str, Json], pointer: Pointer) -> None:
    """Those of one schema. Bounds change in place; raises Refused."""
    for keyword in ("const", "enum"):
        if keyword in schema and not _exact(schema[keyword]):
            raise Refused(
                f"{keyword} at {pointer} has a number beyond +-{MOST_EXACT_INTEGER}, where"
                " integers are not kept exactly"
            )
    for keyword, side in BOUNDS.items():
        value = _number(schema, keyword)
        if value is not None and abs(value) > MOST_EXACT_INTEGER:
            if value * side < 0:
                raise Refused(f"{keyword} {value} at {pointer} is beyond +-{MOST_EXACT_INTEGER}")
            schema[keyword] = side * MOST_EXACT_INTEGER  # narrower: nobody counts farther
    for keyword in COUNTS:
        value = _number(schema, keyword)
        if value is not None:  # 2.0 is 2
            schema[keyword] = min(int(value), MOST_COUNT)


def settle_bounds(schemas: Iterable[dict[str, Json]]) -> None:
    """Move excluded whole numbers that llguidance would let through, in place.

    It lets 0 through where exclusiveMinimum is 0 and maximum is 0.5: whenever the other bound is
    less than one away. The two may come together from any two schemas of a document (allOf, $ref).
    """
    found = list(schemas)
    for low, high, side in (("minimum", "maximum", 1), ("maximum", "minimum", -1)):
        others = sorted(
            value * side
            for schema in found
            for keyword in (high, _EXCLUSIVE[high])
            if (value := _number(schema, keyword)) is not None
        )
        for schema in found:
            keyword = low if schema.get(_EXCLUSIVE[low]) is True else _EXCLUSIVE[low]
            value = _number(schema, keyword)
            if value is None or value != int(value):
                continue
            at = bisect_right(others, value * side)
            if at < len(others) and others[at] - value * side < 1:
                inside = math.nextafter(value, side * math.inf)
                schema[keyword] = inside if value else side * BESIDE_ZERO


def _number(schema: dict[str, Json], keyword: str) -> int | float | None:
    value = schema.get(keyword)
    return value if isinstance(value, int | float) and is_number(value) else None


def _exact(value: Json) -> bool:
    match value:
        case dict():
            return all(map(_exact, value.values()))
        case list():
            return all(map(_exact, value))
        case int() | float() if is_number(value):
            return abs(value) <= MOST_EXACT_INTEGER
    return True
