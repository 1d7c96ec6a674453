"""Tool calls and content, notation by notation, whole and in pieces of every size."""

import json
from collections.abc import Sequence

import pytest

from chat_parsing import CALLS_BEGIN, CALLS_END, answer_of, cut, deltas_of, fenced, plain
from triptych.services.tokenizer.chat_output import (
    CallDelta,
    Content,
    Delta,
    new_parser,
    parser_markers,
    tool_parser_names,
)

Calls = Sequence[tuple[str, str]]

DEEP = '{"a":{"b":"x}"}}'
HARD = (
    '{"text": "</tool_call> \\"quoted\\" \\\\", "世界": ["é😀", {"x": [1, -2.5e3, null]}], "e": {}}'
)
ONE: Calls = [("f", DEEP)]
TWO: Calls = [("f", DEEP), ("g", HARD)]


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name":"{name}","arguments":{arguments}}}\n</tool_call>'


def llama(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


TEXTS: list[tuple[str, str, str, Calls]] = [
    # parser, text, content, calls
    ("hermes", "", "", []),
    ("hermes", "only <b>prose</b>, a < b \n", "only <b>prose</b>, a < b \n", []),
    ("hermes", hermes("f", DEEP), "", ONE),
    ("hermes", f"before {hermes('f', DEEP)} after\n", "before after\n", ONE),
    ("hermes", f"{hermes('f', DEEP)}\n{hermes('g', HARD)}\n", "", TWO),
    ("hermes", f"a\n\n{hermes('f', DEEP)}b{hermes('g', HARD)}\nc", "ab\nc", TWO),
    ("hermes", f'<tool_call>{{"arguments": {HARD}, "name": "g"}}</tool_call>', "", [("g", HARD)]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("f", '{"a": 1}')],
    ),
    (
        "hermes",
        '<tool_call>{"id": [1, {"name": 2}], "name": "f", "arguments": {}, "x": "}"}</tool_call>',
        "",
        [("f", "{}")],
    ),
    ("hermes", '<tool_call>{"name": "undeclared"}</tool_call>', "", [("undeclared", "{}")]),
    ("hermes", f'<tool_call>{{"name":"f","arguments":{DEEP}}}', "", ONE),
    ("hermes", f'<tool_call>{{"name":"f","arguments":{DEEP}}}\n</tool_', "", ONE),
    ("hermes", f'<tool_call>{{"name":"f","arguments":{DEEP}\n</tool_call>', "\n", ONE),
    ("llama3_json", llama("f", DEEP), "", ONE),
    ("llama3_json", f" {llama('f', DEEP)}; {llama('g', HARD)} ", "", TWO),
    ("llama3_json", f"<|python_tag|>{llama('f', DEEP)};{llama('g', HARD)};", "", TWO),
    ("llama3_json", f"Let me. <|python_tag|>{llama('f', DEEP)} ok", "Let me. ok", ONE),
    (
        "llama3_json",
        f'{{"type": "function", "name": "f", "parameters": {DEEP}}}',
        "",
        ONE,
    ),
    ("llama3_json", llama("undeclared", DEEP), llama("undeclared", DEEP), []),
    ("llama3_json", '{"name": "f", "age": 3}', '{"name": "f", "age": 3}', []),
    ("llama3_json", '{"city": "Rome"} and', '{"city": "Rome"} and', []),
    ("llama3_json", f"x {llama('f', DEEP)}", f"x {llama('f', DEEP)}", []),
    ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("mistral", f'[TOOL_CALLS][{{"name": "f", "arguments": {DEEP}}}]', "", ONE),
    (
        "mistral",
        f'a [TOOL_CALLS] [{{"name":"f","arguments":{DEEP}}}, {{"arguments":{HARD},"name":"g"}}] b',
        "a b",
        TWO,
    ),
    ("mistral", f"[TOOL_CALLS]f[ARGS]{DEEP}[TOOL_CALLS]g[ARGS]{HARD}", "", TWO),
    ("mistral", f"[TOOL_CALLS]f[CALL_ID]aB3defghi[ARGS]{DEEP}\n[TOOL_CALLS]g{HARD}", "", TWO),
    ("mistral", "see [1] and [TOOL_CALLS] too", "see [1] and [TOOL_CALLS] too", []),
    ("mistral", "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    ("mistral", '[TOOL_CALLS][{"name": "f"}, {"x": 1}]', ' {"x": 1}]', [("f", "{}")]),
    ("pythonic", "[f(), g(a=1,)]", "", [("f", "{}"), ("g", '{"a": 1}')]),
    (
        "pythonic",
        "[f(s='it\\'s', t=\"d\\\"q\", u='''a'b\n''', "
        "n=-1.5e3, l=[1, (2,), (3), ()], d={'k': None})]",
        "",
        [
            (
                "f",
                '{"s": "it\'s", "t": "d\\"q", "u": "a\'b\\n", "n": -1.5e3, "l": [1, [2], 3, []],'
                ' "d": {"k": null}}',
            )
        ],
    ),
    ("pythonic", "[f(a=True, b=False, c=true, d=.5, e=\"\\u00e9\\d\")]", "",
     [("f", '{"a": true, "b": false, "c": true, "d": 0.5, "e": "é\\\\d"}')]),
    ("pythonic", '[f(**{"a b": ""}), g(x="]), (")]', "",
     [("f", '{"a b": ""}'), ("g", '{"x": "]), ("}')]),
    ("pythonic", "<|python_start|>[f()]<|python_end|>", "", [("f", "{}")]),
    ("pythonic", "So: <|python_start|>[f()]<|python_end|> ok", "So: ok", [("f", "{}")]),
    *(
        ("pythonic", text, text, [])
        for text in (
            "[1, 2]", "[]", "[undeclared()]", "[f(1)]", "[f(a=g())]", "[f(a=1, a=2)]", "[f(a=x)]",
            "[f(a=1+1)]", "[f(a='x' 'y')]", "[f(a=b'x')]", "[f(a='\\ud800')]", "[f(a={1: 2})]",
            "[f(a=01)]", "f(a=1)", "[f(a='x", "[f(*a)]", f"[f(a={'[' * 100}{']' * 100})]",
            "[f({'a': 1})]", "[f(a='x\ny')]", "[f(a=lambda: 1)]",
        )
    ),
    ("deepseek_v3", f"{CALLS_BEGIN}{fenced('f', DEEP)}{CALLS_END}", "", ONE),
    (
        "deepseek_v3",
        f"Now:\n{CALLS_BEGIN}{fenced('f', DEEP)}\n{fenced('g', HARD)}{CALLS_END} done",
        "Now: done",
        TWO,
    ),
    ("deepseek_v31", f"{CALLS_BEGIN}{plain('f', DEEP)}{plain('g', HARD)}{CALLS_END}", "", TWO),
    ("deepseek_v3", f"{CALLS_BEGIN}{plain('function', DEEP)}", "", [("function", DEEP)]),
    ("deepseek_v3", f"{CALLS_BEGIN}x{CALLS_END}", f"{CALLS_BEGIN}x{CALLS_END}", []),
]  # fmt: skip


@pytest.mark.parametrize(("parser", "text", "content", "calls"), TEXTS)
def test_texts(parser: str, text: str, content: str, calls: Calls) -> None:
    whole, called = answer_of(text, parser)
    assert (whole.content, [(each.name, each.arguments) for each in whole.calls]) == (
        content, list(calls),
    )  # fmt: skip
    assert called == bool(calls)
    assert [json.loads(each.arguments) for each in whole.calls] == [json.loads(a) for _, a in calls]
    for size in range(1, len(text)):
        assert answer_of(cut(text, size), parser) == (whole, called), size


R35 = '<tool_call>\n{"name":"f","arguments":{"a":{"b":"x}"}}}\n</tool_call>'


@pytest.mark.parametrize("text", [R35, f"before {R35}{R35} after"])
def test_name_and_id_come_once_in_the_first_delta_of_their_index(text: str) -> None:
    for size in range(1, len(text) + 1):
        pushed, _ = deltas_of(cut(text, size), "hermes")
        calls = [each for push in pushed for each in push if isinstance(each, CallDelta)]
        first = [each for each in calls if each.id or each.name]
        assert [(each.index, each.id, each.name) for each in first] == [
            (index, f"call_{index:024x}", "f") for index in range(text.count(R35))
        ]
        assert [each.index for each in calls] == sorted(each.index for each in calls)
        assert all(
            calls.index(each) == [c.index for c in calls].index(each.index) for each in first
        )


def test_arguments_and_text_are_passed_on_with_the_character_that_makes_them_certain() -> None:
    text = 'a <b> <tool_call>{"name": "f", "arguments": {"x": "y"}}</tool_call>'
    pushed, _ = deltas_of(text, "hermes")
    at = text.index('{"x"')
    assert pushed[0] == [Content("a")]
    assert pushed[1:5] == [[], [], [Content(" <b")], [Content(">")]]
    assert pushed[5:at] == [[]] * (at - 5)
    assert pushed[at] == [CallDelta(0, "call_" + "0" * 24, "f", "{")]
    end = at + len('{"x": "y"}')
    assert pushed[at + 1 : end] == [[CallDelta(0, arguments=each)] for each in text[at + 1 : end]]
    assert pushed[end:] == [[]] * (len(pushed) - end)


def test_one_push_gives_one_delta_of_a_kind() -> None:
    pushed, _ = deltas_of([f"a b c {R35} d e"], "hermes")
    arguments = '{"a":{"b":"x}"}}'
    assert pushed == [
        [Content("a b c"), CallDelta(0, "call_" + "0" * 24, "f", arguments), Content(" d e")], []
    ]  # fmt: skip


BEGUN = [
    ("hermes", 'so <tool_call>{"name": "f", "arguments": ', '{"a": [1, "x'),
    ("llama3_json", 'so <|python_tag|>{"name": "f", "parameters": ', '{"a": [1, "x\\'),
    ("mistral", 'so [TOOL_CALLS][{"name": "f", "arguments": ', '{"a": [1'),
    ("mistral", "so [TOOL_CALLS]f[ARGS]", '{"a": {"b": {}}'),
    ("deepseek_v3", f"so {CALLS_BEGIN}{fenced('f', '|')}".partition("|")[0], '{"a": "'),
    ("deepseek_v31", f"so {CALLS_BEGIN}{plain('f', '|')}".partition("|")[0], '{"a": tr'),
]


@pytest.mark.parametrize(("parser", "before", "arguments"), BEGUN)
def test_a_call_that_is_cut_is_what_there_was_of_it(
    parser: str, before: str, arguments: str
) -> None:
    text = before + arguments
    for size in (1, 3, len(text)):
        whole, called = answer_of(cut(text, size), parser)
        assert [(each.name, each.arguments) for each in whole.calls] == [("f", arguments)]
        assert (whole.content, called) == ("so", False)


@pytest.mark.parametrize(("parser", "before", "arguments"), BEGUN)
def test_a_call_that_is_cut_before_its_arguments_is_content(
    parser: str, before: str, arguments: str
) -> None:
    assert arguments
    for end in range(len(before) + 1):
        whole, called = answer_of(cut(before[:end], 2), parser)
        assert (whole.content, whole.calls, called) == (before[:end], (), False)


def test_arguments_that_are_no_json_end_the_call_but_not_the_text() -> None:
    for broken in ('{"a": ', '{"a": [1}', '{"a": 1]'):
        at = broken.find("}") if "}" in broken else broken.find("]") if "1]" in broken else None
        text = f'<tool_call>{{"name": "f", "arguments": {broken}</tool_call> next {R35}'
        whole, called = answer_of(text, "hermes")
        assert [each.arguments for each in whole.calls] == [broken[:at], '{"a":{"b":"x}"}}']
        assert whole.content.endswith(" next")
        assert not called
        for size in range(1, len(text)):
            assert answer_of(cut(text, size), "hermes") == (whole, called)


def test_a_stop_string_inside_of_a_call_leaves_it_incomplete() -> None:
    cut_off = R35.partition("x}")[0]
    whole, called = answer_of(cut(cut_off, 4), "hermes")
    assert [each.arguments for each in whole.calls] == ['{"a":{"b":"']
    assert (whole.content, called) == ("", False)


def test_a_call_that_lacks_only_its_end_is_complete() -> None:
    for end in range(R35.index("}}}") + 2, len(R35)):
        whole, called = answer_of(R35[:end], "hermes")
        assert ([each.arguments for each in whole.calls], whole.content) == (
            ['{"a":{"b":"x}"}}'], "",
        )  # fmt: skip
        assert called


def test_without_parsers_text_is_content() -> None:
    deltas: list[list[Delta]] = [[Content(" <think>\n")], [], [Content(R35)], []]
    assert deltas_of([" <think>\n", "", R35], None) == (deltas, False)


def test_mistral_gets_ids_that_its_templates_take() -> None:
    whole, _ = answer_of("[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]f[ARGS]{}", "mistral")
    assert [each.id for each in whole.calls] == ["000000000", "000000001"]


@pytest.mark.parametrize(("tools", "reasoning"), [("qwen9", None), (None, "qwen9")])
def test_unknown_parsers_are_refused_with_those_that_there_are(
    tools: str | None, reasoning: str | None
) -> None:
    with pytest.raises(ValueError, match="'qwen9'; there are deepseek_"):
        new_parser(tools, reasoning, hex_digits=str)


def test_markers_are_what_the_parsers_must_see() -> None:
    assert parser_markers(None, None) == frozenset()
    assert parser_markers("hermes", "qwen3") == {
        "<tool_call>", "</tool_call>", "<think>", "</think>",
    }  # fmt: skip
    assert parser_markers("mistral", "mistral") >= {"[TOOL_CALLS]", "[ARGS]", "[THINK]"}
    for name in tool_parser_names():
        for text in (text for parser, text, _, calls in TEXTS if parser == name and calls):
            left_out = text
            for marker in parser_markers(name, None):
                left_out = left_out.replace(marker, "")
            tagged = left_out != text
            assert tagged or name in ("llama3_json", "pythonic")
