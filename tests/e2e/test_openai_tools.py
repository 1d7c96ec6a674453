"""Tools and thoughts through the `openai` package: whole, streamed, and sent back in the next turn.

The model follows a script; the length of the prompt picks the script.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from chat_calls import CITY_SCHEMA, hermes_call
from chat_folders import write_chat_tokenizer
from engine import Engine, running_engine
from scripted_models import T1_EOS, write_s2_positions
from segments import Segments

pytestmark = pytest.mark.e2e

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}:"
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}{% endfor %}"
    "<|im_end|>{% endfor %}"
)
CITY = {"city": "Zürich"}
TEXTS = {
    "call": f"Well.\n{hermes_call('get_weather', CITY)}\n{hermes_call('now', {})}",
    "thoughts": "<think>\nhm\n</think>\n\nIt is warm.",
}
SEGMENTS = Segments({name: [*text.encode(), T1_EOS] for name, text in TEXTS.items()}, first=64)
TOOLS: list[Any] = [
    {"type": "function", "function": {
        "name": "get_weather", "description": "The weather", "parameters": CITY_SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("tools")
    write_chat_tokenizer(folder / "model", TEMPLATE)
    write_s2_positions(folder / "model", SEGMENTS.script, num_positions=1024)
    flags = ("--kv-cache-memory", "16MiB", "--cpu-threads", "1", "--tool-call-parser", "hermes",
             "--reasoning-parser", "qwen3")  # fmt: skip
    with running_engine(folder / "model", folder / "run", *flags) as engine:
        yield engine
        engine.wait_idle()


@pytest.fixture
def client(engine: Engine) -> Iterator[openai.OpenAI]:
    base = f"http://{engine.http_address}/v1"
    with openai.OpenAI(base_url=base, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def asking(name: str) -> dict[str, Any]:
    """What makes the model follow the named script."""
    content = "." * (len(SEGMENTS.prompt(name)) - 2)
    return {"model": "model", "messages": [{"role": "user", "content": content}], "temperature": 0}


def test_calls_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**asking("call"), tools=TOOLS)
    choice = whole.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert (choice.message.content or "").strip() == "Well."
    calls = [(c.function.name, json.loads(c.function.arguments), c.id)
             for c in choice.message.tool_calls or ()]  # fmt: skip
    assert [call[:2] for call in calls] == [("get_weather", CITY), ("now", {})]
    assert len({call[2] for call in calls}) == 2
    with client.chat.completions.stream(**asking("call"), tools=TOOLS) as stream:
        done = [each for each in stream if each.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion().choices[0]
    assert [(each.name, json.loads(each.arguments)) for each in done] == [
        call[:2] for call in calls
    ]
    assert final.message.content == choice.message.content
    assert final.finish_reason == "tool_calls"


@pytest.mark.parametrize("choice", ["required", {"type": "function",
                                                 "function": {"name": "get_weather"}}])  # fmt: skip
def test_calls_that_must_come(client: openai.OpenAI, choice: Any) -> None:
    answer = client.chat.completions.create(
        **asking("thoughts"), tools=TOOLS, tool_choice=choice
    ).choices[0]
    assert not answer.message.content
    (call,) = answer.message.tool_calls or []
    json.loads(call.function.arguments)
    assert answer.finish_reason == ("tool_calls" if choice == "required" else "stop")


def test_the_next_turn_brings_the_calls_back(client: openai.OpenAI, engine: Engine) -> None:
    first = client.chat.completions.create(**asking("call"), tools=TOOLS).choices[0].message
    messages = [
        {"role": "user", "content": "x"},
        first.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": (first.tool_calls or [])[0].id, "content": "sun"},
    ]
    made = httpx.post(
        f"http://{engine.http_address}/tokenize",
        json={"messages": messages, "tools": TOOLS, "return_token_strs": True}, timeout=20,
    ).json()  # fmt: skip
    text = "".join(made["token_strs"]).replace("\\xc3\\xbc", "ü")
    assert "get_weather:city=Zürichnow:" in text
    assert "<|im_start|>sun<|im_end|>" in text


def test_thoughts_stand_apart(client: openai.OpenAI) -> None:
    message = client.chat.completions.create(**asking("thoughts")).choices[0].message
    assert (message.content or "").strip() == "It is warm."
    extra = message.model_extra or {}
    assert extra["reasoning_content"].strip() == "hm"
    chunks = client.chat.completions.create(**asking("thoughts"), stream=True)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    thought = "".join((d.model_extra or {}).get("reasoning_content", "") for d in deltas)
    assert thought == extra["reasoning_content"]
    assert "".join(d.content or "" for d in deltas) == message.content


def test_the_responses_api_has_both(client: openai.OpenAI) -> None:
    tools: list[Any] = [{"type": "function", **each["function"]} for each in TOOLS]
    content = asking("call")["messages"][0]["content"]
    answer = client.responses.create(model="model", input=content, tools=tools, temperature=0)
    kinds = [(item.type, getattr(item, "name", "")) for item in answer.output]
    assert kinds == [("message", ""), ("function_call", "get_weather"), ("function_call", "now")]
    content = asking("thoughts")["messages"][0]["content"]
    answer = client.responses.create(model="model", input=content, temperature=0)
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.output_text.strip() == "It is warm."
    events = client.responses.create(model="model", input=content, temperature=0, stream=True)
    text = "".join(each.delta for each in events if each.type == "response.output_text.delta")
    assert text == answer.output_text
