"""Text with tagged parts in which a form holds: tool calls, thoughts.

Two notations: that of vLLM and SGLang ({"structures": [...], "triggers": [...]}), and xgrammar's
formats ({"type": "structural_tag", "format": {...}}), as its structural tag documentation has them.
Both become Lark. Free text ends at the first trigger, or at the fixed text that must follow it: it
is a lazy terminal, the shortest text that ends so.
"""

from triptych.services.tokenizer.structured_output.json_schema import JsonText
from triptych.services.tokenizer.structured_output.llguidance_text import grammar_text, lark_part
from triptych.services.tokenizer.structured_output.refusal import Pointer, Refused, shown
from triptych.services.tokenizer.structured_output.strict_json import Json, parse_json
from triptych.services.tokenizer.structured_output.tag_fields import Fields
from triptych.services.tokenizer.structured_output.tag_formats import TagFormats


def structural_tag_grammar(text: str, json_text: JsonText) -> str:
    """The grammar of a structural tag's JSON text. Raises Refused."""
    document = parse_json(text)
    if not isinstance(document, dict):
        raise Refused("it must be an object")
    pointer = Pointer()
    if document.get("type", "structural_tag") != "structural_tag":
        raise Refused(f"type {shown(repr(document['type']))} at {pointer} must be structural_tag")
    if "format" in document:
        fields = Fields(document, pointer, needed=("format",), others=("type",))
        tag_format, place = fields.value("format"), pointer.down("format")
    else:
        fields = Fields(document, pointer, needed=("structures", "triggers"), others=("type",))
        tag_format, place = _as_format(fields, pointer), pointer
    formats = TagFormats(json_text)
    start = formats.whole(tag_format, place)
    lark = "\n".join([f"start: {start}", *formats.rules, ""])
    return grammar_text([lark_part("structural_tag", lark), *formats.parts])


def _as_format(fields: Fields, pointer: Pointer) -> Json:
    """The older notation in terms of the newer."""
    tags: list[Json] = []
    for index, structure in enumerate(fields.array("structures")):
        place = pointer.down("structures", index)
        tag = Fields(structure, place, needed=("begin", "schema", "end"))
        schema = tag.value("schema")
        if isinstance(schema, str):  # SGLang's clients send it as text, too
            try:
                schema = parse_json(schema)
            except Refused as refused:
                raise Refused(f"schema at {place}: {refused}") from refused
        content: Json = {"type": "json_schema", "json_schema": schema}
        tags.append({"begin": tag.value("begin"), "content": content, "end": tag.value("end")})
    return {"type": "triggered_tags", "triggers": fields.value("triggers"), "tags": tags}
