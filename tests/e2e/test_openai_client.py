"""The `openai` package against a running engine, with nothing changed but its base URL."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import httpx
import openai
import pytest
from openai.types import CompletionUsage
from pydantic import BaseModel, Field

from engine import Engine, running_engine
from leaving import figures, until
from small_engines import SMALL, tiny_model

pytestmark = pytest.mark.e2e

SMOLLM = Path(__file__).parents[2] / ".models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


class Weather(BaseModel):
    """What a structured answer says."""

    city: Literal["Rome", "Oslo"]
    degrees: int = Field(ge=0, le=9)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("openai")
    model = tiny_model(folder, max_position_embeddings=1024)
    flags = ("--kv-cache-memory", "16MiB", "--cpu-threads", "1", "--served-model-name", "tiny")
    with running_engine(model, folder / "run", *flags) as engine:
        wait_for_http(engine)
        yield engine


@pytest.fixture
def client(engine: Engine) -> Iterator[openai.OpenAI]:
    with client_of(engine) as client:
        yield client


def client_of(engine: Engine) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"http://{engine.http_address}/v1", api_key="none", max_retries=0, timeout=60
    )


def wait_for_http(engine: Engine) -> None:
    """It opens a moment after gRPC; a client would just wait for its answer."""
    assert httpx.get(f"http://{engine.http_address}/health", timeout=20).status_code == 200


def counted(usage: CompletionUsage | None) -> tuple[int, int, int]:
    """But for what the prefix cache had: the second request finds the first one's prompt."""
    assert usage is not None
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


def test_models(client: openai.OpenAI) -> None:
    assert [each.id for each in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "triptych"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_completions_whole_and_streamed_are_the_same(client: openai.OpenAI) -> None:
    whole = client.completions.create(
        model="tiny", prompt="hello", max_tokens=20, temperature=0, logprobs=3
    )
    stream = client.completions.create(
        model="tiny", prompt="hello", max_tokens=20, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert counted(chunks[-1].usage) == counted(whole.usage)
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == 5
    logged = whole.choices[0].logprobs
    assert logged is not None
    assert logged.token_logprobs is not None
    assert len(logged.token_logprobs) == whole.usage.completion_tokens
    assert logged.top_logprobs is not None
    assert max(logged.top_logprobs[0].values()) == logged.token_logprobs[0]  # greedy


def test_chat_whole_and_streamed_are_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], max_completion_tokens=20,
        temperature=0, logprobs=True, top_logprobs=2, n=2, seed=7,
    )  # fmt: skip
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            max_completion_tokens=20,
            temperature=0,
            n=2,
            seed=7,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    for index in range(2):
        parts = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        text = "".join(part.delta.content or "" for part in parts)
        assert text == whole.choices[index].message.content
        assert [p.finish_reason for p in parts if p.finish_reason] == [
            whole.choices[index].finish_reason
        ]
        assert parts[0].delta.role == "assistant"
    assert counted(chunks[-1].usage) == counted(whole.usage)
    logged = whole.choices[0].logprobs
    assert logged is not None
    assert logged.content is not None
    spelled = b"".join(bytes(row.bytes or ()) for row in logged.content)
    assert spelled.decode(errors="replace") == whole.choices[0].message.content
    assert all(len(row.top_logprobs) == 2 for row in logged.content)


def test_the_stream_helper_of_the_package(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="tiny", messages=[{"role": "user", "content": "hi"}], temperature=0,
        extra_body={"structured_outputs": {"regex": "[a-z]{12}"}},
    ) as stream:  # fmt: skip
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "".join(deltas)


def test_vllms_extra_fields(client: openai.OpenAI) -> None:
    def extra(**body: object) -> str:
        answer = client.completions.create(
            model="tiny", prompt="hello", max_tokens=12, seed=3, extra_body=body
        )
        return answer.choices[0].text

    greedy = client.completions.create(model="tiny", prompt="hello", max_tokens=12, temperature=0)
    assert extra(top_k=1) == greedy.choices[0].text
    assert set(extra(allowed_token_ids=[97, 98], ignore_eos=True)) <= {"a", "b"}
    assert extra(guided_choice=["yes", "no"]) in ("yes", "no")
    assert extra(structured_outputs={"regex": "[0-9]{3}"}).isdecimal()
    with pytest.raises(openai.BadRequestError) as caught:
        extra(min_p=2.0)
    assert caught.value.param == "min_p"


def test_response_format_and_parse(client: openai.OpenAI) -> None:
    asked = client.chat.completions.parse(
        model="tiny", messages=[{"role": "user", "content": "weather"}], seed=1,
        response_format=Weather,
    )  # fmt: skip
    weather = asked.choices[0].message.parsed
    assert isinstance(weather, Weather)
    assert asked.choices[0].finish_reason == "stop"
    loose = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "weather"}], seed=1,
        response_format={"type": "json_schema", "json_schema": {
            "name": "w", "schema": {"type": "object", "properties": {"a": {"enum": [1, 2]}},
                                    "required": ["a"], "additionalProperties": False}}},
    )  # fmt: skip
    assert json.loads(loose.choices[0].message.content or "")["a"] in (1, 2)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}],
            response_format={"type": "json_schema", "json_schema": {
                "name": "w", "schema": {"type": "something"}}},
        )  # fmt: skip
    assert caught.value.param == "response_format"


def test_responses_api(client: openai.OpenAI) -> None:
    cut = client.responses.create(
        model="tiny", input="hi", max_output_tokens=2, extra_body={"seed": 1}
    )
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    whole = client.responses.parse(
        model="tiny", input="hi", instructions="be brief", temperature=0, text_format=Weather
    )
    assert whole.status == "completed"
    assert whole.usage is not None
    with client.responses.stream(
        model="tiny", input="hi", instructions="be brief", temperature=0, text_format=Weather
    ) as stream:
        events = list(stream)
        final = stream.get_final_response()
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == final.output_text == whole.output_text
    numbers = [event.sequence_number for event in events if hasattr(event, "sequence_number")]
    assert sorted(set(numbers)) == list(range(len(set(numbers))))
    assert isinstance(whole.output_parsed, Weather)
    assert final.output_parsed == whole.output_parsed
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="tiny", input="hi", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"


def test_errors_are_the_packages_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt="x")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as wrong:
            client.completions.create(model="tiny", prompt="x", temperature=-1, stream=stream)
        assert wrong.value.param == "temperature"
        with pytest.raises(openai.BadRequestError) as long:
            client.completions.create(model="tiny", prompt=[1] * 2000, stream=stream)
        assert long.value.code == "context_length_exceeded"


@pytest.mark.parametrize("queued", [False, True])
def test_closing_a_stream_frees_the_engine(
    client: openai.OpenAI, engine: Engine, queued: bool
) -> None:
    def is_cut_off() -> bool:
        """Midway, where it must be aborted; a busy machine may close it when it is whole."""
        aborted = engine.wait_idle().requests_aborted_total
        with client.completions.create(
            model="tiny", prompt="x", max_tokens=900, stream=True, n=4 if queued else 1,
            extra_body={"ignore_eos": True},
        ) as stream:  # fmt: skip
            next(iter(stream))
            with engine.frozen():
                time.sleep(0.05)  # the last of what it has said arrives
                midway = figures(engine).requests_tracked > 0
                stream.close()
                if midway:
                    until(lambda: figures(engine).requests_aborted_total > aborted, timeout=8)
        engine.wait_idle()
        return midway

    assert sum(is_cut_off() for _ in range(10)) >= 3


def test_metrics_of_both_processes(client: openai.OpenAI, engine: Engine) -> None:
    before = engine.stats("scheduler").scheduler.generated_tokens_total
    client.completions.create(
        model="tiny", prompt="x", max_tokens=5, extra_body={"ignore_eos": True}
    )
    page = httpx.get(f"http://{engine.http_address}/metrics", timeout=10).text
    figures = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    label = '{model_name="tiny"}'
    assert float(figures[f"triptych:generation_tokens_total{label}"]) >= before + 5
    assert float(figures[f"triptych:host_tokens_total{label}"]) >= before + 5
    for name in ("device_tokens", "engine_steps_ahead", "wasted_tokens"):  # of a GPU
        assert float(figures[f"triptych:{name}_total{label}"]) == 0.0
    assert float(figures[f"triptych:kv_cache_usage_perc{label}"]) == 0.0
    assert float(figures[f"triptych:num_requests_running{label}"]) == 0.0


@pytest.mark.smollm
def test_smollm_answers(tmp_path: Path) -> None:
    flags = [*SMALL[2:], "--kv-cache-memory", "64MiB"]
    with running_engine(SMOLLM, tmp_path / "run", *flags) as engine, client_of(engine) as client:
        model = client.models.list().data[0].id
        question = "What is the capital of France?"
        whole = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": question}], temperature=0,
            max_completion_tokens=16,
        )  # fmt: skip
        assert "Paris" in (whole.choices[0].message.content or "")
        chunks = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": [{"type": "text", "text": question}]}],
            temperature=0, max_completion_tokens=16, stream=True,
        )  # fmt: skip
        streamed = "".join(c.choices[0].delta.content or "" for c in chunks)
        assert streamed == whole.choices[0].message.content
        parsed = client.chat.completions.parse(
            model=model, messages=[{"role": "user", "content": "How warm is it in Oslo?"}],
            temperature=0, response_format=Weather,
        )  # fmt: skip
        assert isinstance(parsed.choices[0].message.parsed, Weather)
