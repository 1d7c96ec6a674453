import pytest

from chat_calls import AUTO, NONE, NOW, REQUIRED, WEATHER, chat_request, named
from chat_templates import DEEPSEEK, HERMES, ITEMS, LLAMA3, MISTRAL, QWEN3
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.tokenizer.calling import Calling, ParserNames, calling_of, parsers_of
from triptych.services.tokenizer.chat_output import ChoiceMode
from triptych.v1 import inference_pb2

BOTH = ParserNames("hermes", "qwen3")


@pytest.mark.parametrize(
    ("template", "names"),
    [
        (HERMES, ParserNames("hermes", None)),
        (QWEN3, BOTH),
        (LLAMA3, ParserNames("llama3_json", None)),
        (MISTRAL, ParserNames("mistral", None)),
        (DEEPSEEK, ParserNames("deepseek_v3", "deepseek_r1")),
        (ITEMS, ParserNames()),
        ("", ParserNames()),
    ],
)
def test_parsers_by_template_and_by_name(template: str, names: ParserNames) -> None:
    assert parsers_of("auto", "auto", template) == names
    assert parsers_of("none", "none", template) == ParserNames()
    assert parsers_of("pythonic", "think", template) == ParserNames("pythonic", "think")


def test_unknown_parsers_are_named() -> None:
    with pytest.raises(StartupError, match="tool_call_parser: 'x' is none of auto, none, deep"):
        parsers_of("x", "auto", "")
    with pytest.raises(StartupError, match="reasoning_parser: 'x' is none of auto, none, deep"):
        parsers_of("auto", "x", "")


@pytest.mark.parametrize(
    ("request_", "mode", "tools"),
    [
        (chat_request(), ChoiceMode.NONE, 0),
        (chat_request(choice=NONE), ChoiceMode.NONE, 0),
        (chat_request(choice=AUTO), ChoiceMode.NONE, 0),
        (chat_request(WEATHER, NOW), ChoiceMode.AUTO, 2),
        (chat_request(WEATHER, NOW, choice=NONE), ChoiceMode.NONE, 0),
        (chat_request(WEATHER, NOW, choice=REQUIRED), ChoiceMode.REQUIRED, 2),
        (chat_request(WEATHER, NOW, choice=named("now")), ChoiceMode.NAMED, 2),
    ],
)
def test_what_a_choice_comes_to(
    request_: inference_pb2.ChatRequest, mode: ChoiceMode, tools: int
) -> None:
    calling = calling_of(request_, BOTH)
    assert (calling.choice.mode, len(calling.tools)) == (mode, tools)
    assert calling.parallel
    assert calling.read == ParserNames("hermes" if tools else None, "qwen3")
    masked = mode in (ChoiceMode.REQUIRED, ChoiceMode.NAMED)
    assert calling.has_text is not masked
    assert calling.ends_with_calls is (mode is not ChoiceMode.NAMED)


def test_what_clients_leave_out_means_true() -> None:
    request = chat_request(WEATHER)
    assert calling_of(request, BOTH) == calling_of(
        inference_pb2.ChatRequest(
            tools=[WEATHER], parallel_tool_calls=True, separate_reasoning=True
        ),
        BOTH,
    )
    request.parallel_tool_calls = request.separate_reasoning = False
    calling = calling_of(request, BOTH)
    assert (calling.parallel, calling.separate) == (False, False)


def test_thoughts_are_told_from_text_unless_asked_otherwise() -> None:
    text = "<think>a</think>b"
    for separate, expected in ((True, "Reasoning"), (False, "Content")):
        parser = Calling(BOTH, separate).new_parser()
        deltas = [*parser.push(text), *parser.finish()]
        assert type(deltas[0]).__name__ == expected
