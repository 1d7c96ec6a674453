"""What a client must not be able to do to the door, or to the others who came through it."""

import asyncio
import contextlib
import json
import logging
from functools import partial
from pathlib import Path

import pytest

from http_bench import events, http_bench
from tokenizer_bench import FOREVER, run, until
from triptych.services.tokenizer.openai_http import reply
from triptych.services.tokenizer.server import LoadedModel

LARGE = {"logit_bias": {str(i): 1 for i in range(200)}, "stop": ["x" * 50] * 4}


def test_a_batch_with_large_sampling_fields_is_refused(model: LoadedModel, tmp_path: Path) -> None:
    """1024 times 12 KB from a body of 20 KB kept the loop for 15 s: the scheduler dropped us."""

    async def scenario() -> None:
        async with http_bench(model, tmp_path / "run") as b:
            answer = await b.complete(["a"] * 1024, max_tokens=1, **LARGE)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "prompt"
            assert (await b.complete(["a"] * 8, max_tokens=1, **LARGE)).status_code == 200

    run(scenario)


def test_others_get_their_turn_while_a_batch_starts(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with http_bench(model, tmp_path / "run") as b:
            batch = asyncio.create_task(b.complete(["a"] * 200, max_tokens=1))
            async with asyncio.timeout(30):
                while b.behind.service.stats().tokenizer.requests_running == 0:
                    await asyncio.sleep(0)
            # Not all 200 at once: the loop came back to us when the first had started.
            assert b.behind.service.stats().tokenizer.requests_total < 200
            assert len((await batch).json()["choices"]) == 200

    run(scenario)


def test_the_protocol_refuses_in_the_same_shape(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with http_bench(model, tmp_path / "run") as b:
            for sent in (
                b"\x16\x03\x01hello\r\n\r\n",
                b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n",
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
            ):
                reader, writer = await asyncio.open_connection(*b.host_and_port)
                writer.write(sent)
                head, _, body = (await reader.read()).partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 400 ")
                assert json.loads(body)["error"]["code"] == "invalid_http"
                writer.close()

    run(scenario)


def test_at_the_bound_of_connections_one_is_told_to_come_again(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triptych.services.tokenizer.openai_http.bounded_protocol import BoundedHttpProtocol

    async def scenario() -> None:
        async with http_bench(model, tmp_path / "run") as b:
            assert (await b.client.get("/version")).status_code == 200
            monkeypatch.setattr(BoundedHttpProtocol, "_over", lambda *_: True)
            answer = await b.client.get("/version")
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["error"]["code"] == "unavailable"
            monkeypatch.undo()
            assert (await b.client.get("/version")).status_code == 200

    run(scenario)


def test_whoever_hangs_up_within_the_body_is_no_error_of_ours(
    model: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"

    async def scenario() -> None:
        async with http_bench(model, tmp_path / "run") as b:
            for _ in range(3):
                _, writer = await asyncio.open_connection(*b.host_and_port)
                writer.write(head + b'content-length: 100\r\n\r\n{"prompt"')
                await writer.drain()
                await asyncio.sleep(0.02)
                writer.close()
            await asyncio.sleep(0.05)
            await b.behind.idle()

    run(scenario)
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


def test_errors_name_the_fields_of_each_route(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with http_bench(model, tmp_path / "run") as b:
            for path, body, param in (
                ("/v1/responses", {"input": "x", "text": 5}, "text"),
                ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema"}}},
                 "text.format.schema"),
                ("/tokenize", {"prompt": "x" * 2_000_000}, "prompt"),
                ("/detokenize", {"tokens": [1 << 31]}, "tokens[0]"),
            ):  # fmt: skip
                answer = await b.client.post(path, json=body)
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)

    run(scenario)


def test_the_page_of_the_description_needs_nobody_else(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with http_bench(model, tmp_path / "run") as b:
            page = await b.client.get("/docs")
            assert page.status_code == 200
            assert "<script" not in page.text
            assert "//" not in page.text.replace("<!doctype html>", "")
            for name in ("/v1/chat/completions", "CompletionRequest", "structured_outputs"):
                assert name in page.text

    run(scenario)


def test_many_who_leave_at_once_leave_nothing(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with http_bench(model, tmp_path / "run", FOREVER, interval=0.01) as b:
            body = json.dumps({"prompt": "x", "max_tokens": 4000, "stream": True}).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            request = head + b"content-length: %d\r\n\r\n" % len(body) + body
            opened = [await asyncio.open_connection(*b.host_and_port) for _ in range(60)]
            for index, (reader, writer) in enumerate(opened):
                writer.write(request * (1 + index % 2))  # every other one has sent two
                if index % 3:
                    await reader.readuntil(b"data: ")
            for _, writer in opened:
                writer.close()
            await b.behind.idle()
            answer = await b.complete(max_tokens=2, stream=True)
            assert events(answer.text)

    run(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_who_sent_a_second_request_and_left_has_left_the_first(
    model: LoadedModel, tmp_path: Path, stream: bool
) -> None:
    """uvicorn stops reading then, and would tell the second one only."""

    async def scenario() -> None:
        async with http_bench(model, tmp_path / "run", FOREVER, interval=0.01) as b:
            body = json.dumps({"prompt": "x", "max_tokens": 4000, "stream": stream}).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            request = head + b"content-length: %d\r\n\r\n" % len(body) + body
            _, writer = await asyncio.open_connection(*b.host_and_port)
            writer.write(request * 3)
            await until(lambda: len(b.scheduler.jobs) == 1)
            writer.close()
            await b.behind.idle()
            assert len(b.scheduler.submits) == 1
            # What nobody can wait for is not kept waiting.
            reader, writer = await asyncio.open_connection(*b.host_and_port)
            writer.write(request * 40)
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.close()
            await b.behind.idle()

    run(scenario)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"guided_json": {"type": "string", "pattern": "("}}, "guided_json"),
        ({"structured_outputs": {"json": {"type": "string", "pattern": "("}}},
         "structured_outputs"),
    ],
)  # fmt: skip
def test_a_pattern_that_is_none_is_told_in_words(
    model: LoadedModel, tmp_path: Path, body: dict[str, object], param: str
) -> None:
    async def scenario() -> None:
        async with http_bench(model, tmp_path / "run") as b:
            error = (await b.complete(**body)).json()["error"]
            assert error["param"] == param
            assert error["message"] == f"{param}: #/pattern: invalid regex: unclosed group"

    run(scenario)


def test_an_offer_of_http_2_is_not_taken_and_costs_no_body(
    model: LoadedModel, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with http_bench(model, tmp_path / "run") as b:
            offer = {
                "connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c",
                "http2-settings": "AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
            }  # fmt: skip
            body = {"prompt": "hi", "max_tokens": 1}
            answer = await b.client.post("/v1/completions", json=body, headers=offer)
            assert answer.status_code == 200
            assert (await b.complete(max_tokens=1)).status_code == 200

    run(scenario)


def test_logprobs_that_wait_for_a_whole_answer_are_bounded(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """n, tokens and alternatives of one request multiply: 128 x 8192 x 21 would be a gigabyte."""
    monkeypatch.setattr(reply, "MAX_HELD", 100)

    async def scenario() -> None:
        async with http_bench(model, tmp_path / "run", FOREVER) as b:
            ask = partial(b.complete, n=2, logprobs=1)
            assert (await ask(max_tokens=25)).status_code == 200  # 2 x 25 x 2
            error = (await ask(max_tokens=26)).json()["error"]
            assert (error["param"], error["code"]) == ("logprobs", "invalid_value")
            assert "stream it" in error["message"]
            await b.behind.idle()
            assert len(events((await ask(max_tokens=60, stream=True)).text)) > 10
            assert (await b.complete(max_tokens=200)).status_code == 200

    run(scenario)
