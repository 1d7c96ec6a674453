"""`litellm` against a running engine, as an OpenAI-like server and as a vLLM one."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from client_engine import (
    ANSWER,
    CALLS,
    CONTEXT,
    HELLO,
    THOUGHT,
    TOOLS,
    Weather,
    client_engine,
    content_for,
    prompt_for,
)
from engine import Engine

pytestmark = [
    pytest.mark.e2e,
    # litellm looks at its streamed chunks in a way that newer pydantic warns of.
    pytest.mark.filterwarnings("ignore:Accessing the 'model_.*fields':DeprecationWarning"),
]

PROVIDERS = ["openai", "hosted_vllm"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with client_engine(tmp_path_factory.mktemp("litellm")) as engine:
        yield engine


@pytest.fixture(scope="module")
def litellm() -> Iterator[Any]:  # the package is typed loosely
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else its import asks a public server
        import litellm

        yield litellm


@pytest.fixture(params=PROVIDERS)
def asked(engine: Engine, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Where to ask, and as which provider's model."""
    return {
        "model": f"{request.param}/model", "api_base": f"http://{engine.http_address}/v1",
        "api_key": "none", "num_retries": 0, "max_retries": 0, "timeout": 60, "temperature": 0,
    }  # fmt: skip


def messages(script: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content_for(script)}]


def test_a_chat_whole_and_streamed(litellm: Any, asked: dict[str, Any]) -> None:
    whole = litellm.completion(**asked, messages=messages("hello"))
    assert whole.choices[0].message.content == HELLO
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.completion_tokens == len(HELLO.encode()) + 1
    chunks = list(
        litellm.completion(
            **asked, messages=messages("hello"), stream=True, stream_options={"include_usage": True}
        )
    )
    deltas = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert "".join(each or "" for each in deltas) == HELLO
    rebuilt = litellm.stream_chunk_builder(chunks, messages=messages("hello"))
    assert rebuilt.choices[0].message.content == HELLO
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(rebuilt.usage, name) == getattr(whole.usage, name)


def test_a_chat_that_is_awaited(litellm: Any, asked: dict[str, Any]) -> None:
    async def scenario() -> None:
        whole, stream = await asyncio.gather(
            litellm.acompletion(**asked, messages=messages("hello")),
            litellm.acompletion(**asked, messages=messages("hello"), stream=True),
        )
        deltas = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(deltas) == whole.choices[0].message.content == HELLO

    asyncio.run(scenario())


def test_a_text_completion(litellm: Any, engine: Engine) -> None:
    asked: dict[str, Any] = {
        "model": "text-completion-openai/model", "api_base": f"http://{engine.http_address}/v1",
        "api_key": "none", "max_retries": 0, "temperature": 0, "max_tokens": 60,
        "prompt": prompt_for("hello"),
    }  # fmt: skip
    whole = litellm.text_completion(**asked)
    assert whole.choices[0].text == HELLO
    chunks = list(litellm.text_completion(**asked, stream=True))
    assert "".join(chunk.choices[0].text or "" for chunk in chunks) == HELLO


def test_tools(litellm: Any, asked: dict[str, Any]) -> None:
    whole = litellm.completion(**asked, messages=messages("call"), tools=TOOLS).choices[0]
    assert whole.finish_reason == "tool_calls"
    calls = [(c.function.name, json.loads(c.function.arguments)) for c in whole.message.tool_calls]
    assert calls == CALLS
    chunks = list(litellm.completion(**asked, messages=messages("call"), tools=TOOLS, stream=True))
    rebuilt = litellm.stream_chunk_builder(chunks, messages=messages("call")).choices[0]
    assert rebuilt.finish_reason == "tool_calls"
    calls = [
        (c.function.name, json.loads(c.function.arguments)) for c in rebuilt.message.tool_calls
    ]
    assert calls == CALLS
    forced = litellm.completion(
        **asked, messages=messages("hello"), tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
    ).choices[0]  # fmt: skip
    (call,) = forced.message.tool_calls
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city"}
    after = [
        *messages("hello"), whole.message.model_dump(exclude_none=True),
        *({"role": "tool", "tool_call_id": each.id, "content": "sun"}
          for each in whole.message.tool_calls),
    ]  # fmt: skip
    answer = litellm.completion(**asked, messages=after, tools=TOOLS, max_tokens=1)
    assert answer.usage.prompt_tokens > len(content_for("hello"))


def test_thoughts_stand_apart(litellm: Any, asked: dict[str, Any]) -> None:
    message = litellm.completion(**asked, messages=messages("thoughts")).choices[0].message
    assert message.content.strip() == ANSWER
    assert message.reasoning_content.strip() == THOUGHT
    chunks = list(litellm.completion(**asked, messages=messages("thoughts"), stream=True))
    rebuilt = litellm.stream_chunk_builder(chunks).choices[0].message
    assert rebuilt.content == message.content
    assert rebuilt.reasoning_content == message.reasoning_content


def test_structured_output(litellm: Any, asked: dict[str, Any]) -> None:
    answer = litellm.completion(**asked, messages=messages("hello"), response_format=Weather)
    Weather.model_validate_json(answer.choices[0].message.content)
    answer = litellm.completion(
        **asked, messages=messages("hello"), extra_body={"guided_choice": ["yes", "no"]}
    )
    assert answer.choices[0].message.content in ("yes", "no")


def test_errors(litellm: Any, asked: dict[str, Any]) -> None:
    other = {**asked, "model": asked["model"].replace("model", "other")}
    long = [{"role": "user", "content": "." * 2 * CONTEXT}]
    for stream in (False, True):
        with pytest.raises(litellm.BadRequestError) as wrong:
            litellm.completion(
                **{**asked, "temperature": -1}, messages=messages("hello"), stream=stream
            )
        assert wrong.value.status_code == 400
        assert "temperature" in str(wrong.value)
        with pytest.raises(litellm.NotFoundError) as missing:
            litellm.completion(**other, messages=messages("hello"), stream=stream)
        assert missing.value.status_code == 404
        with pytest.raises(litellm.ContextWindowExceededError):
            litellm.completion(**asked, messages=long, stream=stream)


def test_a_stream_that_is_closed_frees_the_engine(
    litellm: Any, asked: dict[str, Any], engine: Engine
) -> None:
    stream = litellm.completion(
        **asked, messages=messages("hello"), stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    stream.completion_stream.close()
    engine.wait_idle()
    assert httpx.get(f"http://{engine.http_address}/health", timeout=30).status_code == 200
