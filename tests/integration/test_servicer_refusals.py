"""What the tokenizer service refuses, and how it says so."""

import asyncio
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from scripted_models import T1_IM_END
from tokenizer_bench import (
    FOREVER,
    INVALID,
    LENGTH,
    V,
    bench,
    exhausted,
    fields_of,
    has_retry,
    refused,
    request_of,
    run,
    status_of,
)
from triptych.services.tokenizer.server import LoadedModel
from triptych.v1 import inference_pb2, inference_pb2_grpc, stage_pb2


def test_bad_requests_are_refused_at_once_and_leave_nothing(
    model: LoadedModel, tmp_path: Path
) -> None:
    cases: list[tuple[inference_pb2.GenerateRequest, str]] = [
        (inference_pb2.GenerateRequest(), "prompt"),
        (request_of(""), "text"),
        (request_of([]), "token_ids"),
        (request_of([1, V]), "token_ids.ids[1]"),
        (request_of([2**32 - 1]), "token_ids.ids[0]"),
        (request_of([1] * 4096), "token_ids"),
        (request_of([1] * 4095, max_tokens=2), "sampling_params.max_tokens"),
        (request_of("x" * 1_000_000), "text"),
        (request_of(temperature=float("nan")), "sampling_params.temperature"),
        (request_of(stop=["x"] * 500_000), "sampling_params.stop"),
        (request_of(stop_token_ids=[V]), "sampling_params.stop_token_ids[0]"),
    ]

    async def scenario() -> None:
        async with bench(model, tmp_path / "run") as b:
            for request, field in cases:
                started = time.process_time()  # of service and client, whatever else runs here
                error = await refused(b.stub.Generate(request).read())
                assert error.code() is INVALID, field
                assert fields_of(status_of(error)) == [field]
                assert time.process_time() - started < 2
            assert not b.scheduler.submits
            await b.idle()
            assert (await b.generate(max_tokens=3)).text == "abc"

    run(scenario)


@pytest.mark.parametrize("name", ["nobody", "Tiny", "tiny ", "../x", "x" * 10_000])
def test_an_unknown_model_everywhere(model: LoadedModel, tmp_path: Path, name: str) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run") as b:
            message = inference_pb2.ChatMessage(role="user", content="a")
            calls: list[Awaitable[object]] = [
                b.stub.Generate(inference_pb2.GenerateRequest(model=name, text="a")).read(),
                b.stub.Chat(inference_pb2.ChatRequest(model=name, messages=[message])).read(),
                b.stub.Tokenize(inference_pb2.TokenizeRequest(model=name, text="a")),
                b.stub.Detokenize(inference_pb2.DetokenizeRequest(model=name)),
            ]
            for call in calls:
                error = await refused(call)
                assert error.code() is grpc.StatusCode.NOT_FOUND
                info = error_details_pb2.ResourceInfo()
                assert status_of(error).details[0].Unpack(info)
            request = request_of(max_tokens=3)
            request.model = "alias"
            assert len([r async for r in b.stub.Generate(request)]) >= 1

    run(scenario)


def test_a_large_message_is_refused_by_its_size(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", max_message_bytes=100_000) as b:
            error = await refused(b.stub.Generate(request_of("x" * 200_000)).read())
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert (await b.generate(max_tokens=3)).text == "abc"

    run(scenario)


def test_frequent_pings_do_not_kill_a_quiet_stream(model: LoadedModel, tmp_path: Path) -> None:
    """With gRPC's defaults this stream ends after five seconds: GOAWAY, "too many pings"."""
    pings = (
        ("grpc.keepalive_time_ms", 1000),
        ("grpc.keepalive_timeout_ms", 5000),
        ("grpc.http2.max_pings_without_data", 0),
    )

    async def scenario() -> None:
        async with (
            bench(model, tmp_path / "run", b"abc", paused=True) as b,
            grpc.aio.insecure_channel(b.service.address, options=pings) as channel,
        ):
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            call = stub.Generate(request_of(max_tokens=3))
            await asyncio.sleep(6.5)
            b.scheduler.paused = False
            assert (await exhausted(call)).finish_reason == LENGTH

    run(scenario)


def test_an_answer_that_is_too_large_to_send_is_said_by_field(
    model: LoadedModel, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", max_message_bytes=4096) as b:
            text = inference_pb2.TokenizeRequest(
                text="\u00ff" * 2000
            )  # two tokens of two bytes each
            ids = inference_pb2.DetokenizeRequest(
                token_ids=[T1_IM_END] * 1000, skip_special_tokens=False
            )
            for call, field in ((b.stub.Tokenize(text), "text"),
                                (b.stub.Detokenize(ids), "token_ids")):  # fmt: skip
                error = await refused(call)
                assert error.code() is INVALID
                assert fields_of(status_of(error)) == [field]
                assert "max_message_bytes 4096" in str(error.details())

    run(scenario)


def test_too_many_streams(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", FOREVER, max_streams=2, interval=0.01) as b:
            calls = [b.stub.Generate(request_of()) for _ in range(2)]
            for call in calls:
                await call.read()
            error = await refused(b.stub.Generate(request_of()).read())
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "2" in (error.details() or "")
            assert has_retry(status_of(error))
            for call in calls:
                call.cancel()
            await b.idle()
            assert (await b.generate(max_tokens=3)).text == "aaa"

    run(scenario)


def test_a_burst_above_max_streams_is_refused_with_a_hint(
    model: LoadedModel, tmp_path: Path
) -> None:
    """All at once on a new channel, whose client does not know the server's HTTP/2 limits yet."""

    async def scenario() -> None:
        async with bench(model, tmp_path / "run", FOREVER, max_streams=2, interval=0.01) as b:
            calls = [b.stub.Generate(request_of()) for _ in range(400)]
            ends = await asyncio.gather(*(call.read() for call in calls), return_exceptions=True)
            errors = [end for end in ends if isinstance(end, grpc.aio.AioRpcError)]
            assert len(errors) == 398
            for error in errors:
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, error
                assert has_retry(status_of(error))
            for call in calls:
                call.cancel()
            await b.idle()

    run(scenario)


def test_the_bytes_of_open_requests_are_bounded_together(
    model: LoadedModel, tmp_path: Path
) -> None:
    long = "x" * 4000
    limits = {"max_message_bytes": 10_000, "max_prompt_bytes": 10_000}
    slowly = {"interval": 0.2}  # each has room for a hundred tokens

    async def scenario() -> None:
        async with bench(model, tmp_path / "run", FOREVER, **limits, **slowly) as b:
            calls = [b.stub.Generate(request_of(long)) for _ in range(2)]
            for call in calls:
                await call.read()
            session = b.stub.Session()
            start = inference_pb2.SessionStart(id=1, generate=request_of(long))
            await session.write(inference_pb2.SessionRequest(start=start))
            response = await session.read()
            assert isinstance(response, inference_pb2.SessionResponse)
            assert response.events[0].error.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
            session.cancel()
            for asked in (
                b.stub.Generate(request_of(long)).read(),
                b.stub.Tokenize(inference_pb2.TokenizeRequest(text=long)),
                b.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[1] * 4000)),
            ):
                error = await refused(asked)
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert "max_prompt_bytes 10000" in str(error.details())
                assert has_retry(status_of(error))
            assert (await b.generate(max_tokens=3)).text == "aaa"
            for call in calls:
                call.cancel()
            await b.idle()
            assert (await b.generate(long, max_tokens=3)).text == "aaa"

    run(scenario)


def test_tokenize_and_detokenize_take_a_bounded_length(model: LoadedModel, tmp_path: Path) -> None:
    size = 4 * 65_536
    message = inference_pb2.ChatMessage(role="user", content="x" * size)

    async def scenario() -> None:
        async with bench(model, tmp_path / "run") as b:
            calls: list[tuple[Awaitable[object], str]] = [
                (b.stub.Tokenize(inference_pb2.TokenizeRequest(text="x" * (size + 1))), "text"),
                (b.stub.Tokenize(inference_pb2.TokenizeRequest(messages=[message])), "messages"),
                (
                    b.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[1] * (size + 1))),
                    "token_ids",
                ),
            ]
            for call, field in calls:
                error = await refused(call)
                assert error.code() is INVALID
                assert fields_of(status_of(error)) == [field]
                assert str(size) in str(error.details())
            reply = await b.stub.Tokenize(inference_pb2.TokenizeRequest(text="x" * size))
            assert len(reply.token_ids) == size

    run(scenario)


@pytest.mark.parametrize(
    ("reason", "code", "retry"),
    [
        (stage_pb2.FAILURE_REASON_QUEUE_FULL, grpc.StatusCode.RESOURCE_EXHAUSTED, True),
        (stage_pb2.FAILURE_REASON_UNAVAILABLE, grpc.StatusCode.UNAVAILABLE, True),
        (stage_pb2.FAILURE_REASON_TOO_LONG, INVALID, False),
        (stage_pb2.FAILURE_REASON_NOT_FINITE, grpc.StatusCode.INTERNAL, False),
    ],
)
def test_failures_of_the_scheduler(
    model: LoadedModel, tmp_path: Path, reason: Any, code: grpc.StatusCode, retry: bool
) -> None:
    failure = stage_pb2.Failure(reason=reason, message="field: said", retry_after_ms=5)

    async def scenario() -> None:
        async with bench(model, tmp_path / "run", failure=failure) as b:
            error = await refused(b.stub.Generate(request_of()).read())
            assert error.code() is code
            assert "said" in (error.details() or "")
            assert has_retry(status_of(error)) == retry
            await b.idle()
            assert not b.scheduler.aborts

    run(scenario)
