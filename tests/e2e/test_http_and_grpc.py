"""One request over HTTP and over gRPC: the same text, tokens, usage and finish reason."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from engine import Engine, running_engine
from http_bench import data_of
from small_engines import tiny_model
from triptych.v1 import common_pb2, inference_pb2

pytestmark = pytest.mark.e2e

_REASONS = {1: "stop", 2: "length", 4: "tool_calls"}


@dataclass
class Told:
    """What a client learns; by choice."""

    texts: dict[int, str] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    usage: tuple[int, int] = (0, 0)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("both")
    model = tiny_model(folder, max_position_embeddings=512)
    flags = ("--kv-cache-memory", "16MiB", "--cpu-threads", "1")
    with running_engine(model, folder / "run", *flags) as engine:
        yield engine


def wish(number: int) -> dict[str, Any]:
    """Sampling fields, spelled as both doors spell them."""
    r = random.Random(number)
    fields: dict[str, Any] = {"max_tokens": r.randint(1, 40), "seed": r.getrandbits(32)}
    choices: dict[str, Any] = {
        "temperature": r.choice([0.0, 0.5, 1.0, 2.0]), "top_k": r.choice([1, 5, 50]),
        "top_p": r.choice([0.3, 0.9]), "min_p": 0.05, "n": r.choice([1, 2, 3]),
        "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": -0.5,
        "stop": [chr(r.randint(97, 122)), "\x01"], "ignore_eos": True, "min_tokens": 1,
        "stop_token_ids": [r.randrange(256)], "include_stop_str_in_output": True,
        "skip_special_tokens": False, "logit_bias": {65: 5.0, 66: -5.0},
        "bad_words": ["ab"], "typical_p": 0.8,
    }  # fmt: skip
    fields.update({name: choices[name] for name in r.sample(sorted(choices), 5)})
    return fields


def over_grpc(engine: Engine, number: int) -> Told:
    fields = wish(number)
    bias = fields.pop("logit_bias", {})
    params = common_pb2.SamplingParams(**fields, logit_bias=bias)
    told = Told()
    prompt = f"request {number}"
    if number % 2:
        chat = inference_pb2.ChatRequest(sampling_params=params)
        chat.messages.add(role="user", content=prompt)
        add_all(told, engine.stub.Chat(chat, timeout=60))
    else:
        generate = inference_pb2.GenerateRequest(sampling_params=params, text=prompt)
        add_all(told, engine.stub.Generate(generate, timeout=60))
    return told


def add_all(told: Told, responses: Any) -> None:
    for response in responses:
        index = response.index
        told.texts[index] = told.texts.get(index, "") + response.text
        told.ids.setdefault(index, []).extend(response.token_ids)
        if response.finish_reason:
            told.reasons[index] = _REASONS[response.finish_reason]
        if response.HasField("usage"):
            told.usage = (response.usage.prompt_tokens, response.usage.completion_tokens)


def over_http(engine: Engine, client: httpx.Client, number: int) -> Told:
    chat, stream = number % 2 == 1, number % 4 >= 2
    body = {**wish(number), "return_token_ids": True, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    if chat:
        body["messages"] = [{"role": "user", "content": f"request {number}"}]
    else:
        body["prompt"] = f"request {number}"
    answer = client.post("/v1/chat/completions" if chat else "/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    parts = data_of(answer.text) if stream else [answer.json()]
    told = Told()
    for part in parts:
        for choice in part.get("choices", ()):
            index = choice["index"]
            message = choice.get("delta") or choice.get("message") or {}
            text = message.get("content") if chat else choice["text"]
            told.texts[index] = told.texts.get(index, "") + (text or "")
            told.ids.setdefault(index, []).extend(choice.get("token_ids") or ())
            if choice["finish_reason"]:
                assert index not in told.reasons
                told.reasons[index] = choice["finish_reason"]
        if part.get("usage"):
            told.usage = (part["usage"]["prompt_tokens"], part["usage"]["completion_tokens"])
    return told


def test_a_hundred_mixed_requests_say_the_same(engine: Engine) -> None:
    base = f"http://{engine.http_address}"
    with httpx.Client(base_url=base, timeout=60) as client, ThreadPoolExecutor(8) as pool:
        ours = list(pool.map(lambda number: over_grpc(engine, number), range(100)))
        theirs = list(pool.map(lambda number: over_http(engine, client, number), range(100)))
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert other == one, (number, wish(number))
    assert {reason for told in ours for reason in told.reasons.values()} == {"stop", "length"}
    engine.wait_idle()
