"""Usage in streams (R31): one extra chunk, only when asked for, the same as without a stream."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from client_engine import TOOLS, client_engine, content_for
from engine import Engine
from http_bench import Json, events

pytestmark = pytest.mark.e2e

ENDS: dict[str, tuple[str, Json]] = {
    "end of sequence": ("hello", {}),
    "stop string": ("hello", {"stop": ["世"]}),
    "length": ("hello", {"max_tokens": 5}),
    "tool call": ("call", {"tools": TOOLS}),
    "thoughts": ("thoughts", {}),
    "choices": ("hello", {"n": 3, "temperature": 1, "seed": 1}),
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with client_engine(tmp_path_factory.mktemp("usage")) as engine:
        yield engine


@pytest.mark.parametrize("end", ENDS)
def test_usage_is_that_of_the_whole_answer(engine: Engine, end: str) -> None:
    script, more = ENDS[end]
    messages = [{"role": "user", "content": content_for(script)}]
    body = {"messages": messages, "temperature": 0, **more}
    whole = asked(engine, body).json()
    for options, expected in (
        (None, 0), ({}, 0), ({"include_usage": False}, 0), ({"include_usage": True}, 1),
    ):  # fmt: skip
        chunks = events(asked(engine, {**body, "stream": True, "stream_options": options}).text)
        counted = [chunk for chunk in chunks if chunk.get("usage") is not None]
        assert len(counted) == expected
        for chunk in counted:
            assert chunk is chunks[-1]
            assert chunk["choices"] == []
            assert totals(chunk) == totals(whole)
            assert all(each["usage"] is None for each in chunks[:-1])
        reasons = {
            choice["index"]: choice["finish_reason"]
            for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]
        }  # fmt: skip
        assert reasons == {each["index"]: each["finish_reason"] for each in whole["choices"]}


def test_options_of_a_stream_need_one(engine: Engine) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    answer = asked(engine, {**body, "stream_options": {"include_usage": True}})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stream_options"


def asked(engine: Engine, body: Json) -> httpx.Response:
    url = f"http://{engine.http_address}/v1/chat/completions"
    return httpx.post(url, json=body, timeout=30)


def totals(answer: Json) -> tuple[Any, ...]:
    """But for what the prefix cache had."""
    usage = answer["usage"]
    return usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]
