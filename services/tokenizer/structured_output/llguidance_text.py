"""The text that the rest of the engine knows as a grammar: llguidance's JSON form.

{"grammars": [{"name", "lark_grammar"} or {"name", "json_schema"}, ...]}; the first is where a text
begins, and refers to the others as @name.
"""

import json
from collections.abc import Sequence

from triptych.services.tokenizer.structured_output.strict_json import Json, written_json


def lark_part(name: str, lark: str) -> Json:
    """A grammar in Lark's syntax."""
    return {"name": name, "lark_grammar": lark}


def schema_part(name: str, compiled: dict[str, Json]) -> Json:
    """A grammar of JSON, as `compiled_schema` made it."""
    return {"name": name, "json_schema": compiled}


def grammar_text(parts: Sequence[Json]) -> str:
    """The grammar that begins with the first part."""
    return written_json({"grammars": list(parts)})


def lark_literal(text: str) -> str:
    """A Lark terminal for exactly this text, which must not be empty."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\x7f")
