"""The HTTP door: clients that leave, do not read or send, huge bodies, health and drain."""

import asyncio
import json
import socket
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from http_bench import USER, events, http_bench
from tokenizer_bench import FOREVER, LONG, run, until
from triptych.services.tokenizer.openai_http import door
from triptych.services.tokenizer.openai_http.door import HttpLimits
from triptych.services.tokenizer.server import LoadedModel


@pytest.mark.parametrize("stream", [False, True])
def test_whoever_hangs_up_ends_the_work(model: LoadedModel, tmp_path: Path, stream: bool) -> None:
    async def scenario() -> None:
        async with http_bench(model, tmp_path / "run", FOREVER, interval=0.01) as b:
            body = json.dumps({"prompt": "x", "max_tokens": 4000, "stream": stream, "n": 3})
            for _ in range(5):
                reader, writer = await asyncio.open_connection(*b.host_and_port)
                writer.write(
                    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
                    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
                    % (len(body), body.encode())
                )
                await until(lambda: len(b.scheduler.jobs) == 3)
                writer.close()
                del reader
                await until(lambda: not b.scheduler.jobs)
            await b.behind.idle()

    run(scenario)


def test_a_silent_stream_has_comments(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "HttpLimits", partial(HttpLimits, keep_alive=0.05))

    async def scenario() -> None:
        async with http_bench(model, tmp_path / "run", b"abc", paused=True) as b:
            body = {"prompt": "x", "max_tokens": 3, "stream": True}
            async with b.client.stream("POST", "/v1/completions", json=body) as answer:
                text = ""
                async for piece in answer.aiter_text():
                    text += piece
                    if text.count(": keep-alive\n\n") == 3:
                        b.scheduler.paused = False
            assert text.startswith(": keep-alive\n\n")
            assert "".join(c["choices"][0]["text"] for c in events(text)) == "abc"

    run(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_who_does_not_read_gives_the_place_back(
    model: LoadedModel, tmp_path: Path, stream: bool
) -> None:
    """The connection too, though its client holds on to it: else they would add up."""
    opened = psutil.Process().num_fds

    async def scenario() -> None:
        async with http_bench(
            model, tmp_path / "run", [LONG] * 600, max_streams=1, unread_timeout=0.3
        ) as b:
            assert (await b.complete(max_tokens=1)).status_code == 200
            before = opened()
            with socket.create_connection(b.host_and_port) as client:
                body = json.dumps({"prompt": "x", "max_tokens": 600, "stream": stream}).encode()
                client.sendall(
                    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
                    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
                    % (len(body), body)
                )
                await until(lambda: len(b.scheduler.submits) == 2)
                await b.behind.idle()  # while the client is still there
                await until(lambda: opened() == before + 1)  # the client's end
            assert (await b.complete(max_tokens=1)).status_code == 200

    run(scenario)


def test_who_sends_no_whole_head_is_cut_off(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "HttpLimits", partial(HttpLimits, head_seconds=1.0))

    async def scenario() -> None:
        async with http_bench(model, tmp_path / "run", b"abc") as b:
            whole = b"GET /health HTTP/1.1\r\n\r\n"
            for head in (b"", whole[:20], whole + whole[:3]):
                reader, writer = await asyncio.open_connection(*b.host_and_port)
                writer.write(head)
                answer = await asyncio.wait_for(reader.read(), 30)  # until it is closed
                assert answer.startswith(b"HTTP/1.1 200") == head.startswith(whole)
                writer.close()

    run(scenario)


HUGE: list[dict[str, object]] = [
    {"stop": ["a"] * 500_000}, {"bad_words": ["b"] * 50_000}, {"n": 10**9}, {"best_of": 10**6},
    {"prompt": ["x"] * 10**6}, {"logit_bias": {str(i): 1 for i in range(10**6)}},
    {"logprobs": 10**6}, {"user": "x" * (10 << 20)}, {"request_id": "x" * 10**6},
    {"prompt": [1] * (4 << 20)}, {"prompt": "x" * (15 << 20)},
    {"stop_token_ids": [1] * 10**6}, {"guided_choice": ["x"] * 10**6},
    {"response_format": {"type": "json_schema", "json_schema": {
        "schema": {"enum": ["x" * 1000] * 10_000}}}},
]  # fmt: skip


def test_what_is_huge_costs_little(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with http_bench(model, tmp_path / "run", b"abc") as b:
            for body in HUGE:
                answer = await b.complete(**{"prompt": "x", **body})
                assert answer.status_code == 400, (list(body), answer.text[:200])
                assert len(answer.content) < 2048
                param = answer.json()["error"]["param"]
                assert param.partition("[")[0].partition(".")[0] in {*body, "body"}
            answer = await b.chat(messages=[USER] * 100_000)
            assert answer.status_code == 400
            assert (await b.complete(max_tokens=1)).status_code == 200
            assert len(b.scheduler.submits) == 1

    run(scenario)


def test_health_says_what_grpc_says(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with http_bench(model, tmp_path / "run", FOREVER) as b:
            assert (await b.client.get("/health")).status_code == 200
            assert (await b.client.get("/ready")).json()["ready"] is True
            b.scheduler.executor_ready = False
            await until(lambda: not b.behind.service.client.serving)
            health = await b.client.get("/health")
            assert (health.status_code, health.json()) == (503, {"reason": "the executor is gone"})
            assert (await b.client.get("/ready")).json()["ready"] is False
            b.behind.service.client._outage._timeout = 0.0
            answer = await b.complete()
            assert (answer.status_code, answer.json()["error"]["type"]) == (
                503, "service_unavailable_error",
            )  # fmt: skip
            assert answer.json()["error"]["message"].startswith("the executor is gone")
            assert int(answer.headers["retry-after"]) >= 1

    run(scenario)


def test_running_answers_get_the_grace_to_finish(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with http_bench(model, tmp_path / "run", FOREVER, interval=0.005) as b:
            asked = asyncio.create_task(b.complete(max_tokens=60))
            await until(lambda: bool(b.scheduler.jobs))
            stopping = asyncio.create_task(b.behind.service.stop(60.0))
            answer = await asked
            assert answer.status_code == 200
            assert answer.json()["usage"]["completion_tokens"] == 60
            await stopping
            with pytest.raises(httpx.TransportError):
                await b.client.get("/health")

    run(scenario)
