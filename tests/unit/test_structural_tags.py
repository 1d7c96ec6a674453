"""Structural tags, in both notations: what they let through, and what of them is refused."""

import json
from collections.abc import Sequence

import pytest

from grammar_walks import accepts
from triptych.engine_core.errors import InvalidRequest
from triptych.services.tokenizer.structured_output.strict_json import Json
from triptych.services.tokenizer.structured_output.wanted import wanted_grammar
from triptych.v1 import common_pb2

FIELD = "sampling_params.structured_output.structural_tag"
SCHEMA: Json = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
CONTENT: Json = {"type": "json_schema", "json_schema": SCHEMA}
CALL: dict[str, Json] = {"begin": "<f=a>", "content": CONTENT, "end": "</f>"}
NAMED: dict[str, Json] = {
    "begin": "<f=b>",
    "content": {"type": "regex", "pattern": "[a-z]+"},
    "end": "</f>",
}
ONE = '<f=a>{"a":1}</f>'
TWO = "<f=b>xyz</f>"


def grammar_of(document: Json) -> str:
    return wanted_grammar(common_pb2.StructuredOutput(structural_tag=json.dumps(document)))


def formatted(**fields: Json) -> str:
    return grammar_of({"type": "structural_tag", "format": dict(fields)})


def check(grammar: str, right: Sequence[str], wrong: Sequence[str]) -> None:
    for text in right:
        assert accepts(grammar, text), text
    for text in wrong:
        assert not accepts(grammar, text), text


def test_the_older_notation() -> None:
    document: dict[str, Json] = {
        "structures": [
            {"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"},
            {"begin": "<f=b>", "schema": '{"type":"string"}', "end": "</f>"},
        ],
        "triggers": ["<f="],
    }
    right = ("", "hi", "x<f", f"x{ONE}y", f'{ONE}<f=b>"s"</f>\n{ONE} z', '<f=a>{\n  "a": 1\n}</f>')
    wrong = ("<f=", "x<f=c>", "<f=a>1</f>", 'x<f=a>{"a":1}', "<f=b>s</f>")
    for named in ({}, {"type": "structural_tag"}):
        check(grammar_of({**document, **named}), right, wrong)


TRIGGERED = [
    (False, False, ("", "x", ONE, f"x{ONE}", f"{ONE}y", f"{ONE}{TWO}z"), ("<f=", f"x{ONE}<f=")),
    (False, True, ("", "x", ONE, f"x{TWO}"), (f"{ONE}y", ONE + TWO)),
    (True, False, (ONE, f"{ONE}y", f"{TWO}y{ONE}"), ("", "x", f"x{ONE}")),
    (True, True, (ONE, TWO), ("", "x", f"x{ONE}", f"{ONE}y", ONE + TWO)),
]


@pytest.mark.parametrize(("least", "only", "right", "wrong"), TRIGGERED)
def test_triggered_tags(
    least: bool, only: bool, right: Sequence[str], wrong: Sequence[str]
) -> None:
    grammar = formatted(
        type="triggered_tags", triggers=["<f=", "<g="], tags=[CALL, NAMED],
        at_least_one=least, stop_after_first=only,
    )  # fmt: skip
    check(grammar, right, wrong)


SEPARATED = [
    (False, False, ("", ONE, f"{ONE},{TWO},{ONE}"), ("x", f"{ONE},", ONE + ONE)),
    (False, True, ("", ONE), (f"{ONE},{TWO}",)),
    (True, False, (ONE, f"{ONE},{TWO}"), ("",)),
    (True, True, (TWO,), ("", f"{ONE},{TWO}")),
]


@pytest.mark.parametrize(("least", "only", "right", "wrong"), SEPARATED)
def test_tags_with_separator(
    least: bool, only: bool, right: Sequence[str], wrong: Sequence[str]
) -> None:
    grammar = formatted(
        type="tags_with_separator", separator=",", tags=[CALL, NAMED],
        at_least_one=least, stop_after_first=only,
    )  # fmt: skip
    check(grammar, right, wrong)


def test_thoughts_and_then_calls() -> None:
    thought: Json = {
        "type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"
    }  # fmt: skip
    calls: Json = {"type": "triggered_tags", "triggers": ["<f="], "tags": [CALL]}
    grammar = formatted(type="sequence", elements=[thought, calls])
    right = ("<think></think>", f"<think>a<b>\n</thin</think>x{ONE}y")
    check(grammar, right, ("x", "<think>a", f"<think>a</think>{ONE}<f="))


def test_sequences_and_alternatives() -> None:
    either: Json = {
        "type": "or",
        "elements": [{"type": "const_string", "value": "no"}, CONTENT, {"type": "tag", **NAMED}],
    }  # fmt: skip
    before: Json = {"type": "any_text", "excludes": ["\n"]}
    grammar = formatted(
        type="sequence", elements=[before, {"type": "const_string", "value": "> "}, either]
    )
    right = ("> no", 'hi> {"a":2}', f"a>b> {TWO}")
    check(grammar, right, ("no", "> yes", "a\n> no", "a> no > no"))
    regex: Json = {"type": "regex", "pattern": "[a-z]+"}
    grammar = formatted(type="sequence", elements=[regex, {"type": "const_string", "value": "end"}])
    check(grammar, ("aend", "endend"), ("end", "a"))
    own: Json = {"type": "grammar", "grammar": 'root ::= "p" [0-9]'}
    check(formatted(type="tag", begin="", content=own, end="\n"), ("p1\n",), ("p1", "p\n"))


def test_text_of_tags_is_text() -> None:
    begin, end = '<|a|>"\\é', "\n\u2028😀/"
    grammar = formatted(type="tag", begin=begin, content=CONTENT, end=end)
    check(grammar, (f'{begin}{{"a":1}}{end}',), (f'{begin}{{"a":1}}',))


def test_wishes_about_json_hold_inside() -> None:
    raw = common_pb2.StructuredOutput(
        structural_tag=json.dumps({"structures": [], "triggers": []}), disable_any_whitespace=True
    )
    document: Json = {"type": "structural_tag", "format": {"type": "tag", **CALL}}
    raw.structural_tag = json.dumps(document)
    check(wanted_grammar(raw), (ONE,), ('<f=a>{"a": 1}</f>',))


def tag(**changes: Json) -> dict[str, Json]:
    return {"type": "tag", "begin": "<", "content": CONTENT, "end": ">", **changes}


def triggered(**changes: Json) -> dict[str, Json]:
    return {"type": "triggered_tags", "triggers": ["<f="], "tags": [CALL], **changes}


DEEP: Json = {"type": "json_schema", "json_schema": {"items": {"uniqueItems": True}}}
BAD: list[tuple[Json, str]] = [
    ({"type": "qwen_xml_parameter", "json_schema": {}}, "'qwen_xml_parameter' at #/format is not"),
    ({}, "format None at #/format is not supported"),
    ("text", "format None at #/format is not supported"),
    ({"type": "const_string"}, "value is missing at #/format"),
    ({"type": "const_string", "value": 3}, "#/format/value must be a string, not 3"),
    ({"type": "json_schema", "json_schema": {}, "style": "xml"}, "style at #/format is not"),
    (DEEP, "#/format/json_schema: uniqueItems at #/items is not supported"),
    ({"type": "regex", "pattern": ""}, "#/format/pattern: it is empty"),
    ({"type": "regex", "pattern": "("}, "unclosed group"),
    ({"type": "grammar", "grammar": "start: @part_0"}, "@part_0 at line 1: there are no other"),
    ({"type": "grammar", "grammar": 3}, "#/format/grammar: it must be a string"),
    ({"type": "sequence", "elements": []}, "elements at #/format must be an array of 1 to"),
    (
        {"type": "sequence", "elements": [{"type": "any_text"}, CONTENT]},
        "free text at #/format/elements/0 must be last, or a fixed text must follow",
    ),
    (tag(end="", content=triggered(at_least_one=3)), "at_least_one at #/format/content must be"),
    (tag(end="x" * 4097), "#/format/end: 4097 bytes, more than 4096"),
    (triggered(triggers=["<g="]), "begin '<f=a>' at #/format/tags/0 begins with none of the"),
    (triggered(triggers=["<f", "<f="]), "begins with 2 of the triggers"),
    (triggered(triggers=[""]), "#/format/triggers/0 is empty"),
    (triggered(excludes=["x"]), "excludes at #/format is not supported"),
]


@pytest.mark.parametrize(("bad", "why"), BAD, ids=lambda each: str(each)[:40])
def test_bad_formats(bad: Json, why: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        grammar_of({"type": "structural_tag", "format": bad})
    assert raised.value.field == FIELD
    assert why in raised.value.description


@pytest.mark.parametrize(
    ("document", "why"),
    [
        ([], "it must be an object"),
        ({"type": "json_object"}, "type 'json_object' at # must be structural_tag"),
        ({}, "structures is missing at #"),
        ({"structures": [], "triggers": ["x"]}, "structures at # must be an array of 1 to"),
        (
            {"structures": [{"begin": "x"}], "triggers": ["x"]},
            "schema is missing at #/structures/0",
        ),
        ({"format": {"type": "any_text"}, "more": 1}, "more at # is not supported"),
        (
            {"structures": [{"begin": "x", "schema": "{", "end": ""}], "triggers": ["x"]},
            "schema at #/structures/0: it is no JSON",
        ),
    ],
    ids=str,
)
def test_bad_documents(document: Json, why: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        grammar_of(document)
    assert why in raised.value.description
