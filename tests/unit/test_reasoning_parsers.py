"""Thoughts in front of answers, with and without the tag that the prompt may have written."""

import pytest

from chat_parsing import answer_of, cut, deltas_of
from triptych.services.tokenizer.chat_output import Content, Reasoning

OPEN, DONE = "<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n"

TEXTS = [
    # parser, prompt, text, reasoning, content
    ("qwen3", "", "<think>\na\n\nb <b>\n</think>\n\nhi\n", "a\n\nb <b>", "hi\n"),
    ("qwen3", "", "\n<think>\n\n</think>\n\nhi", "", "hi"),
    ("qwen3", "", " hi <think>a</think>", "", " hi <think>a</think>"),
    ("qwen3", "", "<thing>", "", "<thing>"),
    ("qwen3", "", "<thi", "", "<thi"),
    ("qwen3", "", "a</think>b", "", "a</think>b"),
    ("qwen3", "", "<think>never ends </thin \n", "never ends </thin \n", ""),
    ("qwen3", OPEN, "\na<think>b</think>c</think>d", "a<think>b", "c</think>d"),
    ("qwen3", OPEN, "<think>a</think> b", "a", "b"),
    ("qwen3", OPEN, "never", "never", ""),
    ("qwen3", DONE, "hi", "", "hi"),
    ("qwen3", "<think> of a user<|im_start|>assistant\n", "hi", "", "hi"),
    ("deepseek_r1", "", "a\n</think>\n\nb", "a", "b"),
    ("deepseek_r1", "", "<think>\na\n</think>\n\nb", "a", "b"),
    ("deepseek_r1", OPEN, "a</think>b", "a", "b"),
    ("deepseek_r1", "", "never", "never", ""),
    ("deepseek_r1", DONE, "a</think>", "", "a</think>"),
    ("deepseek_r1", "", "", "", ""),
    ("think", "", "<thought>a</think></thought>b", "a</think>", "b"),
    ("think", "", "<thinking>a</thinking>b", "a", "b"),
    ("think", "assistant: <reasoning>", "a</think>b</reasoning>c", "a</think>b", "c"),
    ("mistral", "", "[THINK]a[x][/THINK]b", "a[x]", "b"),
]


@pytest.mark.parametrize(("parser", "prompt", "text", "reasoning", "content"), TEXTS)
def test_texts(parser: str, prompt: str, text: str, reasoning: str, content: str) -> None:
    for tools in (None, "hermes"):
        for size in range(1, len(text) + 2):
            whole, _ = answer_of(cut(text, size), tools, parser, prompt_tail=prompt)
            assert (whole.reasoning, whole.content) == (reasoning, content), (tools, size)


CONTINUED = [
    # the text so far, and whether it is inside of a thought
    ("Sure, ", False),
    ("<think>\nso far", True),
    ("<think>a</think>b", False),
    ("<think>a</think>b<think>", True),
]


@pytest.mark.parametrize(("continued", "inside"), CONTINUED)
@pytest.mark.parametrize("parser", ["qwen3", "deepseek_r1", "think"])
def test_a_continued_message_says_itself_where_it_is(
    parser: str, continued: str, inside: bool
) -> None:
    tail = f"<|im_start|>assistant\n{continued}"[-64:]
    whole, _ = answer_of("x</think>y", None, parser, prompt_tail=tail, continued=continued)
    assert (whole.reasoning, whole.content) == (("x", "y") if inside else ("", "x</think>y"))


def test_a_continued_message_behind_an_opening_of_the_template() -> None:
    tail = f"{OPEN}so far"
    whole, _ = answer_of("x</think>y", None, "qwen3", prompt_tail=tail, continued="so far")
    assert (whole.reasoning, whole.content) == ("x", "y")


def test_calls_in_a_thought_are_thoughts() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    whole, called = answer_of(f"<think>{call}</think>\n{call}", "hermes", "qwen3")
    assert (whole.reasoning, whole.content, called) == (call, "", True)
    assert [(each.name, each.arguments) for each in whole.calls] == [("f", "{}")]
    whole, called = answer_of(f"<think>{call}", "hermes", "qwen3")
    assert (whole.reasoning, whole.calls, called) == (call, (), False)


def test_thoughts_are_passed_on_as_they_come() -> None:
    pushed, _ = deltas_of(["<think>", "\n", "a", " b", "\n", "c\n", "</think", ">", "\n", "d"],
                          None, "qwen3")  # fmt: skip
    assert pushed == [
        [], [], [Reasoning("a")], [Reasoning(" b")], [], [Reasoning("\nc")], [], [], [],
        [Content("d")], [],
    ]  # fmt: skip
