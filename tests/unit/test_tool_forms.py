"""The forms of required, named and strict calls: they compile, and the parsers read what they let
through as calls whose arguments match the tools' schemas."""

import json
import random
from collections.abc import Sequence

import jsonschema
import pytest

from chat_parsing import CALLS_BEGIN, CALLS_END, answer_of, cut, fenced, plain
from grammar_walks import accepts, walk
from triptych.engine_core.errors import InvalidRequest
from triptych.services.tokenizer.chat_output import (
    ChoiceMode,
    ToolChoice,
    ToolSpec,
    kept_schemas,
    tool_form,
    tool_parser_names,
)
from triptych.services.tokenizer.structured_output.wanted import wanted_grammar

AUTO, REQUIRED = ToolChoice(ChoiceMode.AUTO), ToolChoice(ChoiceMode.REQUIRED)
PARSERS = tool_parser_names()
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"enum": ["C", "F"]},
        "at": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "y": {"type": ["boolean", "null"]}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
ODD = {
    "type": "object",
    "properties": {"not a name": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
    "additionalProperties": False,
}
TOOLS = (
    ToolSpec("get_weather", parameters=json.dumps(WEATHER)),
    ToolSpec("f", parameters=json.dumps(ODD)),
    ToolSpec("g"),
)
SCHEMAS = {"get_weather": WEATHER, "f": ODD, "g": {"type": "object", "maxProperties": 0}}
STRICT = tuple(ToolSpec(each.name, "", each.parameters, strict=True) for each in TOOLS)


def calls_text(parser: str, *calls: tuple[str, str]) -> str:
    """Calls, of names with arguments in JSON, as each notation has them."""
    match parser:
        case "hermes":
            form = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
            return "\n".join(form.format(*call) for call in calls)
        case "llama3_json":
            return "; ".join('{{"name": "{}", "parameters": {}}}'.format(*call) for call in calls)
        case "mistral":
            return "".join("[TOOL_CALLS]{}[ARGS]{}".format(*call) for call in calls)
        case "pythonic":
            given = [(name, "" if text == "{}" else f"**{text}") for name, text in calls]
            return f"[{', '.join(f'{name}({text})' for name, text in given)}]"
        case "deepseek_v3":
            return f"{CALLS_BEGIN}{chr(10).join(fenced(*call) for call in calls)}{CALLS_END}"
        case "deepseek_v31":
            return f"{CALLS_BEGIN}{''.join(plain(*call) for call in calls)}{CALLS_END}"
    raise AssertionError(parser)


G = {parser: calls_text(parser, ("g", "{}")) for parser in PARSERS}
TWO = {parser: calls_text(parser, ("g", "{}"), ("g", "{}")) for parser in PARSERS}


def grammar_of(
    parser: str,
    tools: Sequence[ToolSpec] = TOOLS,
    choice: ToolChoice = REQUIRED,
    *,
    parallel: bool = True,
    reasoning: str | None = None,
    prompt_tail: str = "",
) -> str:
    form = tool_form(
        parser, tools, choice, parallel, reasoning_parser=reasoning, prompt_tail=prompt_tail
    )
    assert form is not None
    return wanted_grammar(form)


def walked(grammar: str, seeds: range) -> list[str]:
    """Texts that the grammar lets through; those that did not end are left out."""
    texts = [walk(grammar, random.Random(seed)) for seed in seeds]
    return [text.decode() for text in texts if text is not None]


def check_calls(parser: str, text: str, reasoning: str | None = None) -> list[str]:
    """The names of the calls that a text is; their arguments match."""
    whole, called = answer_of(text, parser, reasoning)
    assert answer_of(cut(text, 3), parser, reasoning) == (whole, called)
    for call in whole.calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    assert called == bool(whole.calls)
    return [each.name for each in whole.calls]


@pytest.mark.parametrize("parser", PARSERS)
def test_required_calls_are_calls_and_nothing_else(parser: str) -> None:
    texts = walked(grammar_of(parser), range(12))
    assert len(texts) >= 8
    names = {name for text in texts for name in check_calls(parser, text)}
    assert names >= {"g"}
    for text in texts:
        assert check_calls(parser, text), text
        assert answer_of(text, parser)[0].content == "", text


@pytest.mark.parametrize("parser", PARSERS)
def test_every_tool_can_be_called(parser: str) -> None:
    for tool in TOOLS:
        grammar = grammar_of(parser, choice=ToolChoice(ChoiceMode.NAMED, tool.name))
        texts = walked(grammar, range(4))
        assert texts
        for text in texts:
            assert check_calls(parser, text) == [tool.name], text


@pytest.mark.parametrize("parser", PARSERS)
def test_what_the_forms_let_through(parser: str) -> None:
    one, two = G[parser], TWO[parser]
    required = grammar_of(parser)
    for text in (one, two):
        assert accepts(required, text), text
        assert check_calls(parser, text) == ["g"] * (2 if text == two else 1)
    named = grammar_of(parser, choice=ToolChoice(ChoiceMode.NAMED, "g"))
    other = grammar_of(parser, choice=ToolChoice(ChoiceMode.NAMED, "f"))
    for text in ("", "no", f"so {one}", one[:-1], f"{one}x"):
        assert not accepts(required, text), text
        assert not accepts(named, text), text
    assert accepts(named, one)
    assert not accepts(named, two)
    assert not accepts(other, one)
    single = grammar_of(parser, parallel=False)
    assert accepts(single, one)
    assert not accepts(single, two)


@pytest.mark.parametrize("parser", PARSERS)
def test_strict_tools_where_calling_is_free(parser: str) -> None:
    grammar = grammar_of(parser, STRICT, AUTO)
    for text in ("", "no calls, <b> or {a} or [b]\n", G[parser], TWO[parser]):
        assert accepts(grammar, text), text
    for wrong in (("h", "{}"), ("g", '{"a": 1}'), ("get_weather", "{}")):
        assert not accepts(grammar, calls_text(parser, wrong)), wrong
    if parser not in ("llama3_json", "pythonic"):
        assert accepts(grammar, f"so {G[parser]}")
    for text in walked(grammar, range(8)):
        check_calls(parser, text)
    single = grammar_of(parser, TOOLS, AUTO, parallel=False)
    assert accepts(single, G[parser])
    assert accepts(single, "no")
    assert not accepts(single, TWO[parser])


def test_arguments_of_tools_that_are_not_strict_are_objects() -> None:
    tools = (ToolSpec("g"), STRICT[0])
    grammar = grammar_of("hermes", tools, AUTO)
    assert accepts(grammar, G["hermes"].replace("{}", '{"what": ["ever"]}'))
    assert not accepts(grammar, G["hermes"].replace("{}", "[]"))
    assert not accepts(grammar, G["hermes"].replace('"g"', '"get_weather"'))


@pytest.mark.parametrize("parser", PARSERS)
def test_a_thought_comes_first(parser: str) -> None:
    thought = "<think>\nhm <tool_call> {\n</think>\n\n"
    begun = grammar_of(parser, reasoning="qwen3", prompt_tail="assistant\n<think>\n")
    maybe = grammar_of(parser, reasoning="qwen3")
    over = grammar_of(parser, reasoning="qwen3", prompt_tail="<think>\n\n</think>\n\n")
    call = G[parser]
    for grammar, right, wrong in (
        (begun, (thought + call, thought.removeprefix("<think>") + call), (call, thought)),
        (maybe, (thought + call, call), (thought, thought.removeprefix("<think>") + call)),
        (over, (call,), (thought + call,)),
    ):
        for text in right:
            assert accepts(grammar, text), text
        for text in wrong:
            assert not accepts(grammar, text), text
    assert check_calls(parser, thought + call, "qwen3") == ["g"]
    free = grammar_of(parser, STRICT, AUTO, reasoning="deepseek_r1")
    for text in (f"hm</think>{call}", "hm</think>\n\nno calls", f"<think>hm</think>\n\n{call}"):
        assert accepts(free, text), text


def test_a_strict_call_cannot_be_written_without_the_tag_around_all_calls() -> None:
    for parser, call_text in (("deepseek_v3", fenced), ("deepseek_v31", plain)):
        grammar = grammar_of(parser, STRICT, AUTO)
        assert accepts(grammar, f"so {call_text('g', '{}')}")
        assert not accepts(grammar, f"so {call_text('h', '{}')}")


def test_nothing_to_keep() -> None:
    assert tool_form("hermes", TOOLS, AUTO, True) is None
    assert tool_form("hermes", STRICT, ToolChoice(ChoiceMode.NONE), False) is None
    assert tool_form("hermes", (), AUTO, False) is None


NO_SCHEMAS = [
    ('{"type": "array"}', 'it must be a schema of type "object"'),
    ("[]", 'it must be a schema of type "object"'),
    ("{", "it is no JSON"),
]


@pytest.mark.parametrize(("parameters", "reason"), NO_SCHEMAS)
def test_parameters_that_are_no_schema_are_refused_by_name(parameters: str, reason: str) -> None:
    tools = (ToolSpec("g"), ToolSpec("f", parameters=parameters))
    with pytest.raises(InvalidRequest, match=r"tools\[1\]\.parameters") as refusal:
        tool_form("hermes", tools, REQUIRED, True)
    assert reason in str(refusal.value)
    assert tool_form("hermes", tools, AUTO, False) is not None


NOT_KEPT = [
    ('{"type": "object", "properties": {"a": {"uniqueItems": true}}}', "uniqueItems at #"),
    ('{"type": "object", "properties": {"a": {"pattern": 3}}}', "pattern at #/properties/a"),
]


@pytest.mark.parametrize(("parameters", "reason"), NOT_KEPT)
def test_the_schema_that_cannot_be_kept_can_be_found(parameters: str, reason: str) -> None:
    tools = (ToolSpec("g"), ToolSpec("f", parameters=parameters, strict=True))
    for choice in (AUTO, REQUIRED, ToolChoice(ChoiceMode.NAMED, "f")):
        with pytest.raises(InvalidRequest):
            grammar_of("hermes", tools, choice)
        schemas = dict(kept_schemas(tools, choice))
        assert ("tools[0].parameters" in schemas) == (choice is REQUIRED)
        with pytest.raises(InvalidRequest) as refusal:
            wanted_grammar(schemas["tools[1].parameters"])
        assert reason in str(refusal.value)
    assert dict(kept_schemas(tools, ToolChoice(ChoiceMode.NAMED, "g"))).keys() == {
        "tools[0].parameters"
    }


def test_a_choice_of_no_tool_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"tool_choice\.name"):
        tool_form("hermes", TOOLS, ToolChoice(ChoiceMode.NAMED, "nobody"), True)
