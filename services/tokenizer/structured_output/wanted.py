"""From the message to the grammar: one of the forms, checked and compiled."""

from typing import assert_never

from triptych.engine_core.sampling_params import MAX_GRAMMAR_BYTES
from triptych.services.tokenizer.structured_output.choice import choice_grammar
from triptych.services.tokenizer.structured_output.compilation import check_compiles
from triptych.services.tokenizer.structured_output.json_object import compiled_object
from triptych.services.tokenizer.structured_output.json_schema import JsonText, compiled_schema
from triptych.services.tokenizer.structured_output.lark import checked_lark
from triptych.services.tokenizer.structured_output.llguidance_text import (
    grammar_text,
    lark_part,
    schema_part,
)
from triptych.services.tokenizer.structured_output.refusal import Refused
from triptych.services.tokenizer.structured_output.regex import regex_grammar
from triptych.services.tokenizer.structured_output.schema_patterns import check_patterns
from triptych.services.tokenizer.structured_output.strict_json import parse_json
from triptych.services.tokenizer.structured_output.structural_tag import structural_tag_grammar
from triptych.services.tokenizer.structured_output.whitespace import json_text
from triptych.v1 import common_pb2


def wanted_grammar(raw: common_pb2.StructuredOutput) -> str:
    """The grammar that a request asks for; it compiles. Raises InvalidRequest."""
    form = raw.WhichOneof("form")
    if form is None:
        raise Refused("none of its forms is set").named("")
    text = json_text(raw)
    try:
        grammar = _grammar(raw, text)
        size = len(grammar.encode())
        if size > MAX_GRAMMAR_BYTES:
            raise Refused(f"it makes a grammar of {size} bytes, more than {MAX_GRAMMAR_BYTES}")
        _check(raw, grammar)
    except Refused as refused:
        raise refused.named(form) from refused
    return grammar


def _check(raw: common_pb2.StructuredOutput, grammar: str) -> None:
    """It must compile; else Refused says why, with the place of a pattern that is the reason."""
    try:
        check_compiles(grammar)
    except Refused:
        if raw.WhichOneof("form") == "json_schema":
            check_patterns(parse_json(raw.json_schema))
        elif raw.WhichOneof("form") == "structural_tag":
            check_patterns(parse_json(raw.structural_tag))
        raise


def _grammar(raw: common_pb2.StructuredOutput, text: JsonText) -> str:
    form = raw.WhichOneof("form")
    match form:
        case "json_schema":
            compiled = compiled_schema(parse_json(raw.json_schema), text)
            return grammar_text([schema_part("json_schema", compiled)])
        case "json_object":
            if not raw.json_object:
                raise Refused("it is false; leave structured_output out instead")
            return grammar_text([schema_part("json_object", compiled_object(text))])
        case "regex":
            return regex_grammar(raw.regex)
        case "grammar":
            return grammar_text([lark_part("grammar", checked_lark(raw.grammar, text))])
        case "choice":
            return choice_grammar(raw.choice.texts)
        case "structural_tag":
            return structural_tag_grammar(raw.structural_tag, text)
        case None:
            raise AssertionError("a form is set")
        case _:
            assert_never(form)
