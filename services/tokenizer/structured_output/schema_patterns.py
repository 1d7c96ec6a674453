"""Which pattern of a schema is the reason that its grammar does not compile: the library's error
does not say where it stands.
"""

from collections.abc import Iterator

from triptych.services.tokenizer.structured_output.compilation import check_compiles
from triptych.services.tokenizer.structured_output.llguidance_text import grammar_text, schema_part
from triptych.services.tokenizer.structured_output.refusal import Pointer, Refused
from triptych.services.tokenizer.structured_output.strict_json import Json

_MOST = 256
"""Patterns that are tried: a refusal may not take much longer than the check itself."""
_VALUES = frozenset({"const", "enum", "default", "examples"})
"""What stands below them is no schema."""


def check_patterns(document: Json) -> None:
    """Compile the patterns of all schemas in a document, one by one.

    Raises Refused for the first that does not compile, with its place.
    """
    for _, (pattern, place) in zip(range(_MOST), _patterns(document), strict=False):
        try:
            check_compiles(grammar_text([schema_part("p", {"type": "string", "pattern": pattern})]))
        except Refused as refused:
            raise Refused(f"{place}: {refused}") from refused


def _patterns(document: Json) -> Iterator[tuple[str, Pointer]]:
    """In the order of the text."""
    waiting: list[tuple[Json, Pointer]] = [(document, Pointer())]
    while waiting:
        value, pointer = waiting.pop()
        if isinstance(value, list):
            below = [(each, pointer.down(index)) for index, each in enumerate(value)]
        elif isinstance(value, dict):
            pattern, named = value.get("pattern"), value.get("patternProperties")
            if isinstance(pattern, str):
                yield pattern, pointer.down("pattern")
            if isinstance(named, dict):
                yield from ((each, pointer.down("patternProperties", each)) for each in named)
            below = [(each, pointer.down(key)) for key, each in value.items() if key not in _VALUES]
        else:
            continue
        waiting.extend(reversed(below))
