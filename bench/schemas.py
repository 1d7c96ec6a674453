"""Two schemas of arrays that do not end soon, documents of theirs, and the check of a beginning."""

import json
import random

ITEMS = 64  # at least in an array, so that no answer ends before it has its tokens
_WORDS = (
    "harbour", "office", "report", "ships", "called", "timber", "quay", "fish", "stone", "crane",
    "council", "March", "basin", "dawn", "pier", "lamp", "storm", "November", "water", "wheel",
    "noon", "oak", "winter", "drawings", "attic", "school", "flour", "bakery", "village",
)  # fmt: skip
_TEXT = {"type": "string", "maxLength": 40}
_PERSON = {
    "name": _TEXT,
    "age": {"type": "integer"},
    "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
    "work": {"enum": ["land", "sea"]},
}


def records_schema(salt: str = "") -> dict[str, object]:
    """A list of people; `salt` makes it a schema that was never there before."""
    properties = {f"{name}{salt}": schema for name, schema in _PERSON.items()}
    item = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "array", "minItems": ITEMS, "items": item}


def texts_schema() -> dict[str, object]:
    """A list of strings: next to nothing of it is forced, so that every token is a mask's."""
    item = {"type": "string", "minLength": 20, "maxLength": 200}
    return {"type": "array", "minItems": ITEMS, "items": item}


def is_person(item: object) -> bool:
    """Whether `records_schema()` allows it."""
    return (
        isinstance(item, dict)
        and list(item) == list(_PERSON)
        and isinstance(item["name"], str)
        and len(item["name"]) <= 40
        and type(item["age"]) is int
        and isinstance(item["tags"], list)
        and len(item["tags"]) <= 3
        and all(isinstance(tag, str) and len(tag) <= 20 for tag in item["tags"])
        and item["work"] in ("land", "sea")
    )


def is_text(item: object) -> bool:
    """Whether `texts_schema()` allows it."""
    return isinstance(item, str) and 20 <= len(item) <= 200


def whole_items(text: str) -> list[object]:
    """The whole items of a JSON array of objects or texts that may break off anywhere.

    Raises ValueError for a text that is no beginning of an array.
    """
    decoder = json.JSONDecoder()
    rest = text.lstrip()
    if not rest.startswith("["):
        raise ValueError(f"no array: {text[:100]!r}")
    items: list[object] = []
    rest = rest[1:].lstrip()
    while rest:
        try:
            item, end = decoder.raw_decode(rest)
        except ValueError:
            return items
        items.append(item)
        rest = rest[end:].lstrip()
        if rest and rest[0] not in ",]":
            raise ValueError(f"no comma behind an item: {rest[:100]!r}")
        rest = rest[1:].lstrip()
    return items


def records_document(generator: random.Random, count: int) -> str:
    """So many people, as `records_schema()` has them."""
    return json.dumps(
        [
            {
                "name": words(generator, 2),
                "age": generator.randrange(1, 100),
                "tags": [words(generator, 1) for _ in range(generator.randrange(4))],
                "work": generator.choice(("land", "sea")),
            }
            for _ in range(count)
        ]
    )


def texts_document(generator: random.Random, count: int) -> str:
    """So many texts, as `texts_schema()` has them."""
    return json.dumps([words(generator, 16) for _ in range(count)])


def words(generator: random.Random, count: int) -> str:
    """So many words of a text about harbours, 11 characters each at most."""
    return " ".join(generator.choices(_WORDS, k=count))
