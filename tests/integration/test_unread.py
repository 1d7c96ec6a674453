"""Clients that live and do not read, or are frozen: their places come back after a time."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from tokenizer_bench import (
    LONG,
    Bench,
    bench,
    exhausted,
    refused,
    request_of,
    run,
    status_of,
    until,
)
from triptych.services.tokenizer.server import LoadedModel
from triptych.v1 import inference_pb2, stage_pb2


def script(submit: stage_pb2.Submit) -> list[int]:
    one = len(submit.prompt_token_ids) == 4  # bytes
    return [LONG] * 100_000 if one else list(b"abc")


async def generated(b: Bench) -> Callable[[], Awaitable[grpc.aio.AioRpcError]]:
    call = b.stub.Generate(request_of([1]))
    await call.read()
    return lambda: refused(exhausted(call))


async def in_session(b: Bench) -> Callable[[], Awaitable[grpc.aio.AioRpcError]]:
    call = b.stub.Session()
    for number in range(2):
        start = inference_pb2.SessionStart(id=number, generate=request_of([1]))
        await call.write(inference_pb2.SessionRequest(start=start))
    await call.read()

    async def read() -> None:
        while isinstance(await call.read(), inference_pb2.SessionResponse):
            pass

    return lambda: refused(read())


@pytest.mark.parametrize("begin", [generated, in_session])
def test_an_rpc_that_nobody_reads_gives_its_place_back(
    model: LoadedModel, tmp_path: Path, begin: Any
) -> None:
    async def scenario() -> None:
        async with bench(
            model, tmp_path / "run", script, max_streams=2, max_unread_tokens=50, unread_timeout=0.2
        ) as b:
            ends = [await begin(b) for _ in range(1 if begin is in_session else 2)]
            await b.idle()  # while the client holds on to its calls
            assert (await b.generate([1, 2], max_tokens=3)).text == "abc"
            for end in ends:
                error = await end()  # and when it reads after all
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert "nothing was read" in str(error.details())
                assert status_of(error).details
            assert (await b.generate([1, 2], max_tokens=3)).text == "abc"

    run(scenario)


def test_who_reads_now_and_then_is_served_to_the_end(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(
            model, tmp_path / "run", script, max_unread_tokens=600, unread_timeout=1.0
        ) as b:
            call = b.stub.Generate(request_of([1], max_tokens=40))
            tokens = 0
            while isinstance(response := await call.read(), inference_pb2.GenerateResponse):
                tokens += len(response.token_ids)
                await asyncio.sleep(0.05)
            assert tokens == 40
            await b.idle()

    run(scenario)


def test_a_time_out_of_0_is_none(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(
            model, tmp_path / "run", script, max_streams=1, max_unread_tokens=50, unread_timeout=0
        ) as b:
            call = b.stub.Generate(request_of([1]))
            await call.read()
            await until(lambda: bool(b.scheduler.aborts))  # nobody reads, and it ends the work
            await asyncio.sleep(0.3)
            assert b.service.stats().tokenizer.requests_running == 1
            call.cancel()
            await b.idle()

    run(scenario)


QUIET_CLIENT = """
import sys
import grpc
from triptych.v1 import common_pb2, inference_pb2, inference_pb2_grpc
with grpc.insecure_channel(sys.argv[1]) as channel:
    request = inference_pb2.GenerateRequest(token_ids=common_pb2.TokenIds(ids=[1, 2]))
    list(inference_pb2_grpc.InferenceServiceStub(channel).Generate(request))
"""


def test_a_frozen_client_whose_request_waits_is_missed(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written to it, so that only pings can tell."""
    made = grpc.aio.server

    def impatient(**options: Any) -> grpc.aio.Server:
        known = dict(options.get("options", ()))
        for name in ("keepalive_time_ms", "keepalive_timeout_ms", "http2.ping_timeout_ms"):
            if f"grpc.{name}" in known:
                known[f"grpc.{name}"] //= 20
        return made(**{**options, "options": list(known.items())})

    monkeypatch.setattr(grpc.aio, "server", impatient)

    async def scenario() -> None:
        async with bench(model, tmp_path / "run", script, paused=True) as b:
            client = await asyncio.create_subprocess_exec(
                sys.executable, "-c", QUIET_CLIENT, b.service.address
            )
            try:
                await until(lambda: bool(b.scheduler.jobs), timeout=20)
                os.kill(client.pid, signal.SIGSTOP)
                await b.idle()
                assert len(b.scheduler.aborts) == 1
            finally:
                client.kill()
                await client.wait()

    run(scenario)
