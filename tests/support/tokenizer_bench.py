"""The tokenizer service over real sockets with a scripted scheduler behind it, and its client."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

import fake_scheduler
from fake_scheduler import FakeScheduler
from triptych.services.runtime.run_dir import RunDir
from triptych.services.tokenizer.server import LoadedModel, TokenizerService
from triptych.services.tokenizer.settings import TokenizerSettings
from triptych.v1 import common_pb2, inference_pb2, inference_pb2_grpc

V = 320
STOP, LENGTH, ABORT = 1, 2, 3
INVALID = grpc.StatusCode.INVALID_ARGUMENT
FOREVER = [ord("a")] * 100_000
LONG = 263  # a token of 20,000 characters


class Bench:
    """A running service, its scheduler and a client."""

    def __init__(
        self, service: TokenizerService, scheduler: FakeScheduler, channel: grpc.aio.Channel
    ) -> None:
        self.service = service
        self.scheduler = scheduler
        self.channel = channel
        self.stub = inference_pb2_grpc.InferenceServiceStub(channel)

    async def generate(self, prompt: str | list[int] = "hi", **params: Any) -> "Joined":
        joined = Joined()
        async for response in self.stub.Generate(request_of(prompt, **params), timeout=60):
            joined.add(response)
        return joined

    async def idle(self) -> None:
        await until(
            lambda: (
                not self.scheduler.jobs
                and self.service.stats().tokenizer.streams == 0
                and self.service.stats().tokenizer.requests_running == 0
            )
        )


class Joined:
    """A whole stream."""

    def __init__(self) -> None:
        self.text = ""
        self.ids: list[int] = []
        self.messages = 0
        self.last = inference_pb2.GenerateResponse()

    def add(self, response: "inference_pb2.GenerateResponse | inference_pb2.ChatResponse") -> None:
        assert not self.last.finish_reason, "nothing follows the last response"
        self.text += response.text
        self.ids += response.token_ids
        self.messages += 1
        self.last = inference_pb2.GenerateResponse.FromString(response.SerializeToString())


def request_of(prompt: str | list[int] = "hi", **params: Any) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(sampling_params=common_pb2.SamplingParams(**params))
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.CopyFrom(common_pb2.TokenIds(ids=prompt))
    return request


async def until(condition: Callable[[], bool], timeout: float = 30.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        await asyncio.sleep(0.005)


@asynccontextmanager
async def bench(
    model: LoadedModel, folder: Path, script: object = b"abc", **options: Any
) -> AsyncIterator[Bench]:
    """`script`: tokens of every request, or a function of its Submit. Others: settings, fields."""
    folder.mkdir(mode=0o700, exist_ok=True)
    run_dir = RunDir.open(folder)
    fields = {key: options.pop(key) for key in list(options) if hasattr(FakeScheduler, key)
              or key in FakeScheduler.__dataclass_fields__}  # fmt: skip
    settings = TokenizerSettings(
        model="m", run_dir=str(folder), port=0, http=options.pop("http", False), http_port=0,
        heartbeat_interval=0.1, heartbeat_timeout=2.0, **options,
    )  # fmt: skip
    answer = script if callable(script) else lambda submit: list(script)  # type: ignore[call-overload]  # test input
    with fake_scheduler.running(
        FakeScheduler(run_dir.scheduler_endpoint, answer, **fields)
    ) as scheduler:
        service = TokenizerService(settings, run_dir, model)
        await service.start()
        try:
            async with grpc.aio.insecure_channel(service.address) as channel:
                await until(lambda: service.client.connected or bool(scheduler.refusal))
                yield Bench(service, scheduler, channel)
        finally:
            await service.stop(0.0)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(100):
            await scenario()

    asyncio.run(bounded())


async def refused(call: Awaitable[object]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def exhausted(
    call: "grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]",
) -> inference_pb2.GenerateResponse:
    """Read to the end; the last response."""
    last = inference_pb2.GenerateResponse()
    while isinstance(response := await call.read(), inference_pb2.GenerateResponse):
        last = response
    return last


def status_of(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            return status_pb2.Status.FromString(value)
    raise AssertionError("no details")


def fields_of(status: status_pb2.Status) -> list[str]:
    request = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(request)
    return [violation.field for violation in request.field_violations]


def has_retry(status: status_pb2.Status) -> bool:
    retry = error_details_pb2.RetryInfo()
    return any(d.Unpack(retry) and retry.retry_delay.ToMilliseconds() > 0 for d in status.details)
