"""The form that a client gives an answer, where the model thinks before it answers."""

import json
from collections.abc import Mapping

from triptych.services.tokenizer.chat_output.call_formats import Format
from triptych.services.tokenizer.chat_output.thought_formats import behind_thought
from triptych.services.tokenizer.structured_output.llguidance_text import lark_literal
from triptych.services.tokenizer.structured_output.refusal import Refused
from triptych.services.tokenizer.structured_output.strict_json import Json, parse_json
from triptych.v1 import common_pb2

_OLDER = frozenset({"structures", "triggers"})
_STRUCTURE = frozenset({"begin", "schema", "end"})


def answer_form(
    form: common_pb2.StructuredOutput,
    reasoning_parser: str,
    *,
    prompt_tail: str = "",
    continued: str = "",
) -> common_pb2.StructuredOutput:
    """The form behind the thought that may, or must, come first, as `new_parser` reads it.

    A form that would be refused comes back as it is, so that the refusal is in its own words. What
    is refused of the new form only (`structural_tag` has bounds of its own) says so in its words.
    Raises ValueError for a parser that there is not.
    """
    try:
        wanted = _as_format(form)
    except Refused:
        return form
    whole = None
    if wanted is not None:
        whole = behind_thought(wanted, reasoning_parser, prompt_tail, continued)
    if whole is None:
        return form
    behind = common_pb2.StructuredOutput()
    behind.CopyFrom(form)
    document = {"type": "structural_tag", "format": whole}
    behind.structural_tag = json.dumps(document, ensure_ascii=False)
    return behind


def _as_format(form: common_pb2.StructuredOutput) -> Format | None:
    """As a format of a structural tag; None for what is refused. Raises Refused, too."""
    kind = form.WhichOneof("form")
    if _says_of_json(form) and kind not in ("json_schema", "json_object", "structural_tag"):
        return None
    wanted: Format | None = None
    match kind:
        case "json_schema":
            wanted = {"type": "json_schema", "json_schema": parse_json(form.json_schema)}
        case "json_object" if form.json_object and not form.disable_additional_properties:
            wanted = {"type": "json_schema", "json_schema": {"type": "object"}}
        case "regex":
            wanted = {"type": "regex", "pattern": form.regex}
        case "grammar":
            wanted = {"type": "grammar", "grammar": form.grammar}
        case "choice" if form.choice.texts and all(form.choice.texts):
            # One terminal: as many rules side by side would be too many at one place.
            texts = " | ".join(map(lark_literal, dict.fromkeys(form.choice.texts)))
            wanted = {"type": "grammar", "grammar": f"start: CHOICE\nCHOICE: {texts}\n"}
        case "structural_tag":
            wanted = _tag_format(parse_json(form.structural_tag))
    return wanted


def _says_of_json(form: common_pb2.StructuredOutput) -> bool:
    return (
        form.HasField("whitespace_pattern")
        or form.HasField("disable_any_whitespace")
        or form.HasField("disable_additional_properties")
    )


def _tag_format(document: Json) -> Format | None:
    if not isinstance(document, dict) or document.get("type", "structural_tag") != "structural_tag":
        return None
    fields = document.keys() - {"type"}
    wanted = document.get("format")
    if fields == {"format"} and isinstance(wanted, dict):
        return wanted
    structures = document.get("structures")
    if fields != _OLDER or not isinstance(structures, list):
        return None
    tags = [_tag(each) for each in structures if isinstance(each, dict)]
    if len(tags) < len(structures) or None in tags:
        return None
    return {"type": "triggered_tags", "triggers": document["triggers"], "tags": tags}


def _tag(structure: Mapping[str, Json]) -> Json:
    """One of the older notation, whose schema may be text; None for what is refused."""
    if structure.keys() != _STRUCTURE:
        return None
    schema = structure["schema"]
    if isinstance(schema, str):
        schema = parse_json(schema)
    content: Json = {"type": "json_schema", "json_schema": schema}
    return {"begin": structure["begin"], "content": content, "end": structure["end"]}
