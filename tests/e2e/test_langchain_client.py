"""`langchain-openai` against a running engine, with nothing changed but its base URL."""

import asyncio
import json
from collections.abc import Generator, Iterator
from typing import Any

import openai
import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import SecretStr

from client_engine import (
    CALLS,
    CONTEXT,
    HELLO,
    TOOLS,
    Weather,
    client_engine,
    content_for,
    prompt_for,
)
from engine import Engine

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with client_engine(tmp_path_factory.mktemp("langchain")) as engine:
        yield engine


@pytest.fixture
def chat(engine: Engine) -> ChatOpenAI:
    return chat_of(engine)


def chat_of(engine: Engine, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"http://{engine.http_address}/v1", api_key=SecretStr("none"), model="model",
        temperature=options.pop("temperature", 0), max_retries=0, timeout=60, stream_usage=True,
        **options,
    )  # fmt: skip


def joined(chunks: Iterator[Any]) -> AIMessageChunk:
    whole = next(chunks)
    for chunk in chunks:
        whole = whole + chunk
    assert isinstance(whole, AIMessageChunk)
    return whole


def counted(message: AIMessage) -> tuple[int, int, int]:
    """But for what the prefix cache had."""
    usage = message.usage_metadata
    assert usage is not None
    return usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]


def test_a_chat_whole_and_streamed(chat: ChatOpenAI) -> None:
    whole = chat.invoke(content_for("hello"))
    assert isinstance(whole, AIMessage)
    assert whole.content == HELLO
    assert whole.response_metadata["finish_reason"] == "stop"
    streamed = joined(iter(chat.stream(content_for("hello"))))
    assert streamed.content == HELLO
    assert counted(streamed) == counted(whole)
    assert counted(whole)[1] == len(HELLO.encode()) + 1
    both = chat.batch([content_for("hello")] * 2)
    assert [each.content for each in both] == [HELLO] * 2


def test_a_chat_that_is_awaited(engine: Engine) -> None:
    async def scenario() -> None:
        chat = chat_of(engine)
        whole = await chat.ainvoke(content_for("hello"))
        deltas = [str(chunk.content) async for chunk in chat.astream(content_for("hello"))]
        assert "".join(deltas) == whole.content == HELLO

    asyncio.run(scenario())


def test_a_text_completion(engine: Engine) -> None:
    model = OpenAI(
        base_url=f"http://{engine.http_address}/v1", api_key=SecretStr("none"), model="model",
        temperature=0, max_retries=0, max_tokens=60,
    )  # fmt: skip
    assert model.invoke(prompt_for("hello")) == HELLO
    assert "".join(model.stream(prompt_for("hello"))) == HELLO


def test_tools(chat: ChatOpenAI) -> None:
    tooled = chat.bind_tools(TOOLS)
    whole = tooled.invoke(content_for("call"))
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == CALLS
    assert whole.response_metadata["finish_reason"] == "tool_calls"
    streamed = joined(iter(tooled.stream(content_for("call"))))
    assert [(call["name"], call["args"]) for call in streamed.tool_calls] == CALLS
    assert streamed.content == whole.content
    answers = [ToolMessage("sun", tool_call_id=call["id"]) for call in whole.tool_calls]
    after = [HumanMessage(content_for("hello")), whole, *answers]
    assert counted(tooled.bind(max_tokens=1).invoke(after))[0] > len(content_for("hello"))


@pytest.mark.parametrize(("choice", "names"), [("get_weather", {"get_weather"}),
                                               ("any", {"get_weather", "now"})])  # fmt: skip
def test_calls_that_must_come(chat: ChatOpenAI, choice: str, names: set[str]) -> None:
    forced = chat.bind_tools(TOOLS, tool_choice=choice, parallel_tool_calls=False)
    (call,) = forced.invoke(content_for("hello")).tool_calls
    assert call["name"] in names
    assert not chat.bind_tools(TOOLS, tool_choice="none").invoke(content_for("call")).tool_calls


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(engine: Engine, method: Any) -> None:
    chat = chat_of(engine, temperature=1, seed=1)
    answer = chat.with_structured_output(Weather, method=method).invoke(content_for("hello"))
    assert isinstance(answer, Weather)


def test_the_form_of_an_answer_streamed(chat: ChatOpenAI) -> None:
    schema = {"title": "w", "type": "object", "properties": {"a": {"enum": [1, 2]}},
              "required": ["a"], "additionalProperties": False}  # fmt: skip
    made = chat.with_structured_output(schema, method="json_schema", strict=True)
    parts = list(made.stream(content_for("hello")))
    last = parts[-1]
    assert isinstance(last, dict)
    assert last["a"] in (1, 2)


def test_logprobs_and_extra_fields(engine: Engine) -> None:
    chat = chat_of(engine, logprobs=True, top_logprobs=2, extra_body={"guided_regex": "[a-c]{4}"})
    message = chat.invoke(content_for("hello"))
    rows = message.response_metadata["logprobs"]["content"]
    spelled = b"".join(bytes(row["bytes"] or ()) for row in rows)
    assert spelled.decode() == message.content
    assert all(len(row["top_logprobs"]) == 2 for row in rows)


def test_the_responses_api(engine: Engine) -> None:
    chat = chat_of(engine, use_responses_api=True)
    assert chat.invoke(content_for("hello")).text == HELLO
    assert joined(iter(chat.stream(content_for("hello")))).text == HELLO
    tooled = chat.bind_tools(TOOLS)
    for message in (
        tooled.invoke(content_for("call")),
        joined(iter(tooled.stream(content_for("call")))),
    ):
        assert [(call["name"], call["args"]) for call in message.tool_calls] == CALLS


def test_errors(engine: Engine, chat: ChatOpenAI) -> None:
    def streamed(model: ChatOpenAI, content: str) -> None:
        list(model.stream(content))

    def whole(model: ChatOpenAI, content: str) -> None:
        model.invoke(content)

    for ask in (whole, streamed):
        with pytest.raises(openai.BadRequestError) as wrong:
            ask(chat_of(engine, temperature=-1), content_for("hello"))
        assert wrong.value.param == "temperature"
        with pytest.raises(openai.NotFoundError) as missing:
            ask(chat_of(engine, extra_body={"model": "other"}), content_for("hello"))
        assert missing.value.code == "model_not_found"
        with pytest.raises(ContextOverflowError):
            ask(chat, "." * 2 * CONTEXT)


def test_a_stream_that_is_closed_frees_the_engine(engine: Engine) -> None:
    chat = chat_of(engine, extra_body={"ignore_eos": True})
    stream = chat.stream(content_for("hello"))
    next(stream)
    assert isinstance(stream, Generator)
    stream.close()
    engine.wait_idle()
    assert json.dumps(chat_of(engine).invoke(content_for("hello")).content)
