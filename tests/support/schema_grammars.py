"""JSON Schemas as grammars, and why some are none."""

import json
from typing import TypeAlias

import pytest

from triptych.engine_core.errors import InvalidRequest
from triptych.services.tokenizer.structured_output.strict_json import Json
from triptych.services.tokenizer.structured_output.wanted import wanted_grammar
from triptych.v1 import common_pb2

FIELD = "sampling_params.structured_output.json_schema"
STRING: Json = {"type": "string"}
Source: TypeAlias = "Json | str"


def grammar_of(schema: Source, *, compact: bool = False, closed: bool = False) -> str:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    raw = common_pb2.StructuredOutput(
        json_schema=text, disable_any_whitespace=compact, disable_additional_properties=closed
    )
    return wanted_grammar(raw)


def refusal(schema: Source, *, closed: bool = False) -> str:
    with pytest.raises(InvalidRequest) as raised:
        grammar_of(schema, closed=closed)
    assert raised.value.field == FIELD
    assert "\n" not in str(raised.value)
    assert "<state>" not in str(raised.value)
    assert len(str(raised.value)) < 600
    return raised.value.description


def said(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
