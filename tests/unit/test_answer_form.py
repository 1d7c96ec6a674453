"""A client's form behind a thought."""

import json

import pytest

from chat_parsing import answer_of
from grammar_walks import accepts
from triptych.engine_core.errors import InvalidRequest
from triptych.services.tokenizer.chat_output import answer_form
from triptych.services.tokenizer.structured_output.wanted import wanted_grammar
from triptych.v1 import common_pb2
from triptych.v1.common_pb2 import Choices, StructuredOutput

OPEN, DONE = "<|im_start|>assistant\n<think>\n", "<think>\n\n</think>\n\n"
SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
STRUCTURES = '[{"begin": "<f>", "schema": %s, "end": "</f>"}]'

FORMS = [
    # form, texts that match, texts that do not
    (StructuredOutput(json_schema=SCHEMA), ['{"a": 1}', '{"a":1}'], ['{"a": "x"}', "", "[]"]),
    (StructuredOutput(json_schema=SCHEMA, disable_any_whitespace=True), ['{"a":1}'], ['{"a": 1}']),
    (StructuredOutput(json_object=True), ["{}", '{"b": []}'], ["[]", ""]),
    (StructuredOutput(regex="[a-c]+"), ["abc"], ["", "d"]),
    (StructuredOutput(grammar='start: "a" B\nB: /[0-9]+/'), ["a12"], ["a"]),
    (StructuredOutput(grammar='root ::= "yes" | "no"'), ["yes", "no"], ["y"]),
    (StructuredOutput(choice=Choices(texts=["a", 'b"\n', "ab"])), ["a", 'b"\n', "ab"], ["b", ""]),
    (
        StructuredOutput(structural_tag='{"format": {"type": "const_string", "value": "x"}}'),
        ["x"],
        ["", "y"],
    ),
    *(
        (
            StructuredOutput(
                structural_tag=f'{{"triggers": ["<f"], "structures": {STRUCTURES % schema}}}'
            ),
            ["", "so", 'so <f>{"a": 1}</f> and'],
            ["<f>", "<f>1</f>"],
        )
        for schema in (SCHEMA, json.dumps(SCHEMA))
    ),
]


@pytest.mark.parametrize(("form", "right", "wrong"), FORMS)
def test_forms(form: common_pb2.StructuredOutput, right: list[str], wrong: list[str]) -> None:
    thought = "<think>\nhm {\n</think>\n\n"
    begun = wanted_grammar(answer_form(form, "qwen3", prompt_tail=OPEN))
    maybe = wanted_grammar(answer_form(form, "qwen3"))
    for text in right:
        assert accepts(begun, thought.removeprefix("<think>\n") + text), text
        assert accepts(maybe, thought + text), text
        assert accepts(maybe, text), text
        answer, _ = answer_of(thought + text, None, "qwen3")
        assert (answer.reasoning, answer.content) == ("hm {", text)
    for text in wrong:
        assert not accepts(begun, thought.removeprefix("<think>\n") + text), text
        assert not accepts(maybe, thought + text), text
        if text:
            assert not accepts(maybe, text), text
    assert not accepts(begun, "hm")
    assert answer_form(form, "qwen3", prompt_tail=DONE) == form


REFUSED = [
    StructuredOutput(),
    StructuredOutput(json_schema="{"),
    StructuredOutput(json_object=False),
    StructuredOutput(json_object=True, disable_additional_properties=True),
    StructuredOutput(regex="a", whitespace_pattern=" "),
    StructuredOutput(grammar='start: "a"', disable_any_whitespace=True),
    StructuredOutput(choice=Choices()),
    StructuredOutput(choice=Choices(texts=["a", ""])),
    StructuredOutput(structural_tag="[]"),
    StructuredOutput(structural_tag='{"type": "x", "format": {"type": "any_text"}}'),
    StructuredOutput(structural_tag='{"format": {"type": "any_text"}, "triggers": []}'),
    StructuredOutput(structural_tag='{"structures": [1], "triggers": ["<"]}'),
    StructuredOutput(structural_tag='{"structures": [{"begin": "<"}], "triggers": ["<"]}'),
    StructuredOutput(structural_tag=f'{{"structures": {STRUCTURES % 0}}}'),
]


@pytest.mark.parametrize("form", REFUSED)
def test_what_is_refused_is_refused_in_its_own_words(form: common_pb2.StructuredOutput) -> None:
    assert answer_form(form, "qwen3") == form
    with pytest.raises(InvalidRequest):
        wanted_grammar(form)
