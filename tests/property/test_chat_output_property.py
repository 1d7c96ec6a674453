"""Answers of any kind, cut anywhere: how they are cut changes nothing, and nothing is lost."""

import ast
import itertools
import json
import warnings
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_parsing import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    SEP,
    answer_of,
    deltas_of,
    fenced,
    plain,
)
from triptych.services.tokenizer.chat_output import (
    CallDelta,
    joined,
    reasoning_parser_names,
    tool_parser_names,
)
from triptych.services.tokenizer.structured_output.strict_json import Json

PROSE = [
    "a", " b", "\n", " ", "\t\n", "世界", "😀", "e\u0301", "<", "[", "{", "}", "]", '"', "\\", ",",
    ";", ":", "(", ")", "=", "'", "<t", "<tool_", "[TOOL_", "</", "f", "g", "1", "null",
]  # fmt: skip
THOUGHTS = [
    "<think>", "</think>", "<think>\nhm\n</think>\n\n", "[THINK]", "[/THINK]", "<thought>",
    "</thought>",
]  # fmt: skip
ARGUMENTS = [
    "{}", '{"a": 1}', '{"x": "}\\"]", "y": [{"é": "</tool_call>\\\\"}, []]}',
    '{"世": "\\ud83d\\ude00 😀"}',
    '"{\\"a\\": 1}"', '{"a": }', '{"a": [}', '{"a": "',
]  # fmt: skip
CALL_FORMS = {
    "hermes": [
        '<tool_call>\n{"name": "f", "arguments": @}\n</tool_call>',
        '<tool_call>{"arguments": @, "name": "new"}</tool_call>', "<tool_call>", "</tool_call>",
    ],
    "llama3_json": [
        '{"name": "f", "parameters": @}', '<|python_tag|>{"arguments": @, "name": "g"}',
        '{"name": "h", "parameters": @}', "<|python_tag|>", "; ",
    ],
    "mistral": [
        '[TOOL_CALLS][{"name": "f", "arguments": @}]', "[TOOL_CALLS]f[ARGS]@",
        '[TOOL_CALLS][{"name": "f", "arguments": @}, {"arguments": @, "name": "g"}]',
        "[TOOL_CALLS]g[CALL_ID]x1[ARGS]@", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
    ],
    "pythonic": [
        "[f(**@), g(a=@)]", "[f(a=1, b='x\\'', c=(None,))]", "<|python_start|>[f()]<|python_end|>",
        "[g(a=[1, {'k': True}], b=\"\"\"q\"q\"\"\")", "<|python_start|>", "[f(", "g(a=",
    ],
    "deepseek_v3": [
        fenced("f", "@"), f"{CALLS_BEGIN}{fenced('g', '@')}{CALLS_END}", CALLS_BEGIN, CALLS_END,
        CALL_BEGIN, CALL_END, SEP, "```json", "```",
    ],
    "deepseek_v31": [
        plain("f", "@"), f"{CALLS_BEGIN}{plain('g', '@')}{plain('f', '@')}{CALLS_END}",
        CALLS_BEGIN, CALL_BEGIN, f"{CALL_BEGIN}function", SEP,
    ],
}  # fmt: skip
"""What a call of each notation looks like, and pieces of it; @ stands for the arguments."""


def texts_of(parser: str | None) -> st.SearchStrategy[str]:
    """Prose, thoughts and calls, whole, wrong and cut off, in any order."""
    forms = CALL_FORMS[parser] if parser else list(itertools.chain(*CALL_FORMS.values()))
    calls = st.builds(
        lambda form, arguments: form.replace("@", arguments),
        st.sampled_from(forms),
        st.sampled_from(ARGUMENTS),
    )
    cut_call = st.builds(lambda text, end: text[: end % (len(text) + 1)], calls, st.integers(0, 99))
    part = st.one_of(
        st.sampled_from(PROSE),
        calls,
        calls,
        cut_call,
        st.sampled_from(THOUGHTS),
        st.text(max_size=3),
    )
    return st.lists(part, max_size=9).map("".join)


def cuts(text: str, ends: Sequence[int]) -> list[str]:
    places = sorted({end % (len(text) + 1) for end in ends} | {0, len(text)})
    return [text[start:end] for start, end in itertools.pairwise(places)]


ENDS = st.lists(st.integers(0, 999), max_size=12)
TAILS = st.sampled_from(["", "assistant\n<think>\n", "</think>\n\n"])


@pytest.mark.parametrize("parser", [None, *tool_parser_names()])
@given(st.data(), st.sampled_from([None, *reasoning_parser_names()]), ENDS, TAILS)
def test_how_a_text_is_cut_changes_nothing(
    parser: str | None, data: st.DataObject, reasoning: str | None, ends: list[int], tail: str
) -> None:
    text = data.draw(texts_of(parser))
    whole = answer_of(text, parser, reasoning, prompt_tail=tail)
    assert answer_of(cuts(text, ends), parser, reasoning, prompt_tail=tail) == whole
    assert answer_of(list(text), parser, reasoning, prompt_tail=tail) == whole


@pytest.mark.parametrize("parser", tool_parser_names())
@given(st.data())
def test_nothing_is_lost_and_nothing_is_doubled(parser: str, data: st.DataObject) -> None:
    text = data.draw(texts_of(parser))
    pushed, called = deltas_of(list(text), parser)
    deltas = list(itertools.chain.from_iterable(pushed))
    answer = joined(deltas)
    if not answer.calls:
        assert (answer.content, called) == (text, False)
    left = iter(text)
    assert all(character in left for character in answer.content), "not in the text's order"
    indices = [each.index for each in deltas if isinstance(each, CallDelta)]
    first = [each.index for each in deltas if isinstance(each, CallDelta) and each.id and each.name]
    assert first == list(range(len(answer.calls)))
    assert indices == sorted(indices)
    if parser != "pythonic":
        for call in answer.calls:
            assert call.arguments == "{}" or call.arguments in text or call.arguments == '{"a": 1}'


@pytest.mark.parametrize("reasoning", reasoning_parser_names())
@given(texts_of(None), TAILS)
def test_thought_and_content_are_the_text_but_for_white_space_and_tags(
    reasoning: str, text: str, tail: str
) -> None:
    answer, _ = answer_of(text, None, reasoning, prompt_tail=tail)
    left = iter(text)
    assert all(character in left for character in answer.reasoning + answer.content)
    tags = "[THINK][/THINK]" if reasoning == "mistral" else "<reasoning></reasoning>"
    spaces = sum(map(text.count, " \t\r\n"))
    assert len(text) - len(answer.reasoning) - len(answer.content) <= len(tags) + spaces


VALUES: st.SearchStrategy[Json] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)  # fmt: skip


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,4}", fullmatch=True), VALUES, max_size=3), ENDS)
def test_python_values_are_read_as_python_reads_them(
    arguments: dict[str, Json], ends: list[int]
) -> None:
    written = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    answer, called = answer_of(cuts(f"[f({written}), g(**{arguments!r})]", ends), "pythonic")
    assert [json.loads(each.arguments) for each in answer.calls] == [arguments, arguments]
    assert (answer.content, called) == ("", True)


IN_STRINGS = [
    "a", "1", "é", "'", '"', "\\'", '\\"', "\\\\", "\\n", "\\x41", "\\x4", "\\u00e9",
    "\\ud83d\\ude00", "\\ud83d", "\\U0001F600", "\\1", "\\018", "\\d", "\\\n", "\n", "\\N{DASH}",
    "#", "{",
    ")", "]", " ",
]  # fmt: skip
BETWEEN = [
    "1", "0", "01", ".5", "5.", "-", "+", "e3", "_", "True", "None", "[", "]", "(", ")", "{", "}",
    ":", ",", " ", "\n", "''", '"a"', "'b'", "'a': ", "#", "1, ", "x", "f()", "...",
]  # fmt: skip
LITERALS = st.one_of(
    st.builds(
        lambda quotes, parts: quotes + "".join(parts) + quotes,
        st.sampled_from(["'", '"', "'''", '"""', "r'"]),
        st.lists(st.sampled_from(IN_STRINGS), max_size=5),
    ),
    st.lists(st.sampled_from(BETWEEN), max_size=6).map("".join),
    st.lists(st.sampled_from(BETWEEN), max_size=4).map(lambda parts: f"[{''.join(parts)}]"),
    st.lists(st.sampled_from(BETWEEN), max_size=4).map(lambda parts: f"({''.join(parts)})"),
    st.lists(st.sampled_from(BETWEEN), max_size=4).map(lambda parts: f"{{'k': {''.join(parts)}}}"),
)


@settings(max_examples=500)
@given(LITERALS)
def test_what_is_read_is_what_python_reads(literal: str) -> None:
    """Whatever looks like a literal: it is refused, or means what it means in Python."""
    answer, called = answer_of(f"[f(a={literal})]", "pythonic")
    if called and not answer.content:
        with warnings.catch_warnings(action="ignore"):  # of escapes that Python leaves as they are
            call = ast.parse(f"f(a={literal})", mode="eval").body
        assert isinstance(call, ast.Call)
        assert not call.args
        meant = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
        assert json.loads(json.dumps(meant)) == json.loads(answer.calls[0].arguments) or (
            "\\ud83d\\ude00" in literal  # one character in JSON, two halves in Python
        )
