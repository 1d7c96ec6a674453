"""The HTTP door over real sockets: answers whole and streamed, errors, what is known of it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from http_bench import data_of, events, http_bench
from tokenizer_bench import FOREVER, run
from triptych.services.tokenizer.server import LoadedModel
from triptych.v1 import stage_pb2


def test_a_completion_whole_and_streamed(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with http_bench(model, tmp_path / "run", "é世!".encode()) as b:
            whole = (await b.complete("hello", max_tokens=6)).json()
            choice = whole["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == ("é世!", "length")
            assert whole["usage"] == {
                "prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11,
                "prompt_tokens_details": {"cached_tokens": 0},
            }  # fmt: skip
            answer = await b.complete("hello", max_tokens=6, stream=True)
            assert answer.headers["content-type"].startswith("text/event-stream")
            chunks = events(answer.text)
            assert "".join(c["choices"][0]["text"] for c in chunks) == "é世!"
            reasons = [c["choices"][0]["finish_reason"] for c in chunks]
            assert reasons == [None] * (len(chunks) - 1) + ["length"]
            assert len({c["id"] for c in chunks}) == 1
            await b.behind.idle()

    run(scenario)


def test_chat_begins_with_the_role_and_ends_with_an_empty_delta(
    model: LoadedModel, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with http_bench(model, tmp_path / "run", b"abc") as b:
            chunks = events((await b.chat(max_tokens=3, stream=True)).text)
            deltas = [c["choices"][0]["delta"] for c in chunks]
            assert deltas[0].keys() == {"role", "content"}
            assert deltas[0]["role"] == "assistant"
            assert deltas[0]["content"].startswith("a")
            assert all("role" not in each for each in deltas[1:])
            assert deltas[-1] == {}
            assert "".join(each.get("content", "") for each in deltas) == "abc"
            assert chunks[-1]["choices"][0]["finish_reason"] == "length"

    run(scenario)


@pytest.mark.parametrize(
    ("options", "expected"),
    [(None, 0), ({}, 0), ({"include_usage": False}, 0), ({"include_usage": True}, 1)],
)
def test_usage_comes_once_and_only_when_asked_for(
    model: LoadedModel, tmp_path: Path, options: dict[str, bool] | None, expected: int
) -> None:
    async def scenario() -> None:
        async with http_bench(model, tmp_path / "run", b"abc") as b:
            for ask in (b.complete, b.chat):
                body = {"stream": True, "max_tokens": 3, "stream_options": options}
                chunks = events((await ask(**body)).text)
                assert sum(c.get("usage") is not None for c in chunks) == expected
                if expected:
                    assert chunks[-1]["choices"] == []
                    assert chunks[-1]["usage"]["completion_tokens"] == 3
                    assert all(c["usage"] is None for c in chunks[:-1])
                assert (await ask(stream_options={})).status_code == 400

    run(scenario)


def test_prompts_of_a_batch_are_numbered_in_order(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        def script(submit: stage_pb2.Submit) -> list[int]:
            return [submit.prompt_token_ids[0]] * 3  # says the prompt's first letter

        async with http_bench(model, tmp_path / "run", script) as b:
            body = {"n": 2, "max_tokens": 3}
            whole = (await b.complete(["x", [121], "z"], **body)).json()
            texts = [each["text"] for each in whole["choices"]]
            assert texts == ["xxx", "xxx", "yyy", "yyy", "zzz", "zzz"]
            assert [each["index"] for each in whole["choices"]] == list(range(6))
            assert whole["usage"]["prompt_tokens"] == 3
            assert whole["usage"]["completion_tokens"] == 18
            text = (await b.complete(["x", [121], "z"], stream=True, **body)).text
            streamed = dict.fromkeys(range(6), "")
            for chunk in events(text):
                streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
            assert list(streamed.values()) == texts
            refused = await b.complete(["x", ""])
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
            assert not b.scheduler.jobs
            await b.behind.idle()

    run(scenario)


def test_logprobs_in_both_shapes(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        text = "a世b"
        async with http_bench(model, tmp_path / "run", text.encode()) as b:
            for stream in (False, True):
                answer = await b.complete(max_tokens=5, logprobs=2, stream=stream)
                parts = events(answer.text) if stream else [answer.json()]
                logged = [p["choices"][0]["logprobs"] for p in parts if p["choices"]]
                offsets = [o for each in logged if each for o in each["text_offset"]]
                assert offsets == [0, 1, 1, 1, 2]
                tokens = [t for each in logged if each for t in each["tokens"]]
                assert tokens == ["a", "\\xe4", "\\xb8", "\\x96", "b"]
                answer = await b.chat(max_tokens=5, logprobs=True, top_logprobs=2, stream=stream)
                parts = events(answer.text) if stream else [answer.json()]
                logged = [p["choices"][0]["logprobs"] for p in parts]
                rows = [row for each in logged if each for row in each["content"]]
                assert b"".join(bytes(row["bytes"]) for row in rows).decode() == text
                assert [len(row["top_logprobs"]) for row in rows] == [2] * 5
            none = (await b.chat(max_tokens=1)).json()["choices"][0]["logprobs"]
            zero = (await b.chat(max_tokens=1, logprobs=True)).json()["choices"][0]["logprobs"]
            assert none is None
            assert zero["content"][0]["top_logprobs"] == []
            zero = (await b.complete(max_tokens=1, logprobs=0)).json()["choices"][0]["logprobs"]
            assert list(zero["top_logprobs"][0]) == ["a"]  # the drawn one is always there
            assert (await b.chat(top_logprobs=1)).json()["error"]["param"] == "top_logprobs"
            error = (await b.chat(logprobs=True, top_logprobs=21)).json()["error"]
            assert (error["param"], "20" in error["message"]) == ("top_logprobs", True)

    run(scenario)


def test_echo_begins_with_the_prompt_and_its_logprobs(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with http_bench(model, tmp_path / "run", b"c") as b:
            for prompt in ("ab", [97, 98]):
                answer = await b.complete(prompt, echo=True, logprobs=1, max_tokens=1)
                choice = answer.json()["choices"][0]
                assert choice["text"] == "abc"
                assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
                assert choice["logprobs"]["text_offset"] == [0, 1, 2]
                assert choice["logprobs"]["token_logprobs"][0] is None
                assert None not in choice["logprobs"]["token_logprobs"][1:]

    run(scenario)


# ----------------------------------------------------------------------------------------- errors


def test_a_stream_that_is_refused_is_no_stream(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with http_bench(model, tmp_path / "run", b"abc", max_model_len=64) as b:
            for stream in (False, True):
                for body, param in (({"n": 0}, "n"), ({"prompt": [1] * 65}, "prompt")):
                    answer = await b.complete(**{"stream": stream, **body})
                    assert answer.status_code == 400
                    assert answer.json()["error"]["param"] == param
                code = (await b.complete([1] * 65, stream=stream)).json()["error"]["code"]
                assert code == "context_length_exceeded"
                answer = await b.complete(model="other", stream=stream)
                assert (answer.status_code, answer.json()["error"]["code"]) == (
                    404, "model_not_found",
                )  # fmt: skip
            assert b.scheduler.submits == []

    run(scenario)


@pytest.mark.parametrize(
    ("reason", "status", "retry"),
    [("QUEUE_FULL", 429, "3"), ("UNAVAILABLE", 503, "3"), ("TIMED_OUT", 504, None),
     ("NOT_FINITE", 500, None)],
)  # fmt: skip
def test_what_the_scheduler_refuses_has_its_status(
    model: LoadedModel, tmp_path: Path, reason: str, status: int, retry: str | None
) -> None:
    async def scenario() -> None:
        failure = stage_pb2.Failure(
            reason=stage_pb2.FailureReason.Value(f"FAILURE_REASON_{reason}"),
            message="for the test", retry_after_ms=2500,
        )  # fmt: skip
        async with http_bench(model, tmp_path / "run", b"abc", failure=failure) as b:
            for stream in (False, True):
                answer = await b.chat(stream=stream)
                assert answer.status_code == status
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
                assert answer.headers.get("retry-after") == retry

    run(scenario)


def test_too_many_requests_are_told_to_come_again(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with http_bench(model, tmp_path / "run", FOREVER, max_streams=1, interval=0.05) as b:
            async with b.client.stream(
                "POST", "/v1/completions", json={"prompt": "x", "max_tokens": 999, "stream": True}
            ):
                answer = await b.complete()
                assert answer.status_code == 429
                assert int(answer.headers["retry-after"]) >= 1
            await b.behind.idle()
            assert (await b.complete(max_tokens=1)).status_code == 200

    run(scenario)


def test_a_stream_that_breaks_ends_with_one_error_event(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with http_bench(model, tmp_path / "run", b"abc") as b:  # then it waits for ever
            body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
            async with b.client.stream("POST", "/v1/chat/completions", json=body) as answer:
                text = ""
                async for piece in answer.aiter_text():
                    text += piece
                    if '"content":"c"' in text or '"content":"bc"' in text or "abc" in text:
                        await b.behind.service.stop(0.0)
            data = data_of(text)
            assert set(data[-1]) == {"error"}
            assert data[-1]["error"]["code"] == "unavailable"
            assert "[DONE]" not in text
            assert all(c["choices"][0]["finish_reason"] is None for c in data[:-1])

    run(scenario)


def test_bodies_and_heads_are_bounded(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with http_bench(model, tmp_path / "run", b"abc", http_max_body_bytes=4096) as b:
            big = b'{"prompt":"' + b"x" * 5000 + b'"}'
            json_type = {"content-type": "application/json"}
            answer = await b.client.post("/v1/completions", content=big, headers=json_type)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")

            async def pieces() -> AsyncIterator[bytes]:
                yield big

            answer = await b.client.post("/v1/completions", content=pieces(), headers=json_type)
            assert answer.status_code == 413
            answer = await b.client.post("/v1/completions", content=b"{}")
            assert answer.status_code == 415
            answer = await b.client.get("/health", headers={"x-long": "x" * (1 << 20)})
            assert answer.status_code == 431
            reader, writer = await asyncio.open_connection(*b.host_and_port)
            writer.write(b"GET /health HTTP/1.1\r\nx: ")
            with pytest.raises(ConnectionError):  # noqa: PT012 - the server hangs up at some write
                for _ in range(1000):
                    writer.write(b"y" * 4096)
                    await writer.drain()
            writer.close()
            del reader
            answer = await b.client.get("/nope")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
            answer = await b.client.get("/v1/completions")
            assert answer.status_code == 405
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            assert (await b.complete(max_tokens=1)).status_code == 200

    run(scenario)


# ---------------------------------------------------------------------------------- what is known


def test_models_tokens_version_metrics_and_description(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with http_bench(model, tmp_path / "run", b"abc") as b:
            listed = (await b.client.get("/v1/models")).json()
            assert [each["id"] for each in listed["data"]] == ["tiny", "alias"]
            assert (await b.client.get("/v1/models/alias")).json()["max_model_len"] == 4096
            assert (await b.client.get("/v1/models/x/y")).status_code == 404
            made = (await b.client.post("/tokenize", json={"prompt": "hi"})).json()
            assert (made["tokens"], made["count"], made["max_model_len"]) == ([104, 105], 2, 4096)
            chat = {"messages": [{"role": "user", "content": "hi"}], "return_token_strs": True}
            made = (await b.client.post("/tokenize", json=chat)).json()
            assert made["token_strs"][0] == "<|im_start|>"
            both = await b.client.post("/tokenize", json={"prompt": "x", **chat})
            assert both.status_code == 400
            back = await b.client.post("/detokenize", json={"tokens": made["tokens"]})
            assert "<|im_start|>user" in back.json()["prompt"]
            bad = await b.client.post("/detokenize", json={"tokens": [1, 1 << 31]})
            assert bad.json()["error"]["param"] == "tokens[1]"
            await b.chat(max_tokens=3)
            await b.behind.generate(max_tokens=3)  # over gRPC
            page = (await b.client.get("/metrics")).text
            for line in (
                'triptych:request_success_total{finished_reason="length",model_name="tiny"} 2.0',
                'triptych:request_generation_tokens_sum{model_name="tiny"} 6.0',
                'triptych:time_to_first_token_seconds_count{model_name="tiny"} 2.0',
                'triptych:inter_token_latency_seconds_count{model_name="tiny"}',
                'triptych:scheduler_connected{model_name="tiny"} 1.0',
            ):
                assert line in page
            assert "triptych:kv_cache_usage_perc" not in page  # nobody knows it here
            described = (await b.client.get("/openapi.json")).json()
            for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"):
                body = described["paths"][path]["post"]["requestBody"]["content"]
                name = body["application/json"]["schema"]["$ref"].rpartition("/")[2]
                assert name in described["components"]["schemas"]
            assert (await b.client.get("/docs")).status_code == 200

    run(scenario)
