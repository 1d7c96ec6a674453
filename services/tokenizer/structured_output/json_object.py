"""Any JSON object."""

from triptych.services.tokenizer.structured_output.json_schema import JsonText, compiled_schema
from triptych.services.tokenizer.structured_output.strict_json import Json


def compiled_object(text: JsonText) -> dict[str, Json]:
    """As llguidance's `json_schema`."""
    return compiled_schema({"type": "object"}, text)
