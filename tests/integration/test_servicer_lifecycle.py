"""How streams of the tokenizer service end early; health, lost schedulers, stopping."""

import asyncio
import time
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

import fake_scheduler
from fake_scheduler import FakeScheduler
from tokenizer_bench import (
    FOREVER,
    LENGTH,
    LONG,
    Bench,
    bench,
    exhausted,
    has_retry,
    refused,
    request_of,
    run,
    status_of,
    until,
)
from triptych.services.runtime.run_dir import RunDir
from triptych.services.tokenizer.server import LoadedModel
from triptych.v1 import inference_pb2_grpc, stage_pb2


def test_cancel_reaches_the_scheduler(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", FOREVER) as b:
            call = b.stub.Generate(request_of())
            await call.read()
            call.cancel()
            await until(lambda: b.scheduler.aborts == [b.scheduler.submits[0].slot])
            b.scheduler.paused = True
            waiting = b.stub.Generate(request_of())
            await until(lambda: len(b.scheduler.submits) == 2)
            waiting.cancel()
            await until(lambda: len(b.scheduler.aborts) == 2)
            await b.idle()

    run(scenario)


def test_a_lost_connection_aborts(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", FOREVER) as b:
            async with grpc.aio.insecure_channel(b.service.address) as channel:
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                call = stub.Generate(request_of())
                await call.read()
            await until(lambda: len(b.scheduler.aborts) == 1)
            await b.idle()

    run(scenario)


def test_deadlines(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", FOREVER) as b:
            for _ in range(10):
                error = await refused(b.stub.Generate(request_of(), timeout=0.0).read())
                assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await b.idle()
            assert not b.scheduler.submits
            b.scheduler.paused = True
            error = await refused(b.stub.Generate(request_of(), timeout=0.2).read())
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await until(lambda: bool(b.scheduler.aborts))
            await b.idle()

    run(scenario)


def test_a_slow_reader_is_ended_and_its_work_stopped(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        # Large pieces of text, so that the transport's own buffers are full soon.
        def script(submit: stage_pb2.Submit) -> list[int]:
            return [LONG] * 100_000 if len(submit.prompt_token_ids) == 4 else list(b"abc")

        async with bench(model, tmp_path / "run", script, max_unread_tokens=50) as b:
            slow = b.stub.Generate(request_of([1]))
            await slow.read()
            await until(lambda: len(b.scheduler.aborts) == 1, timeout=10)
            assert (await b.generate([1, 2], max_tokens=3)).text == "abc"
            error = await refused(exhausted(slow))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "more than 50 tokens" in (error.details() or "")
            await b.idle()

    run(scenario)


async def health_of(b: Bench, service: str = "triptych.v1.InferenceService") -> int:
    request = health_pb2.HealthCheckRequest(service=service)
    status: int = (await health_pb2_grpc.HealthStub(b.channel).Check(request)).status
    return status


def test_health_follows_the_executor(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run") as b:
            assert await health_of(b) == await health_of(b, "") == 1
            b.scheduler.executor_ready = False
            await until(lambda: not b.service.client.ready)
            assert await health_of(b) == 2
            error = await refused(b.stub.Generate(request_of()).read())
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert has_retry(status_of(error))
            b.scheduler.executor_ready = True
            await until(lambda: b.service.client.ready)
            assert (await b.generate(max_tokens=3)).text == "abc"

    run(scenario)


def test_health_tells_of_a_stuck_step(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run") as b:
            watch = health_pb2_grpc.HealthStub(b.channel).Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == 1
            b.scheduler.step_age_ms = 2001
            assert (await watch.read()).status == 2
            assert (await b.generate(max_tokens=3)).text == "abc"  # it waits, nothing is refused
            b.scheduler.step_age_ms = 0
            assert (await watch.read()).status == 1

    run(scenario)


def test_torn_outputs_end_the_connection_and_not_the_process(
    model: LoadedModel, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", FOREVER, torn=True) as b:
            error = await refused(exhausted(b.stub.Generate(request_of())))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            b.scheduler.jobs.clear()
            b.scheduler.torn = False
            # Torn outputs that are still on their way end the connection again, maybe in between.
            for _ in range(100):
                await until(lambda: b.service.client.ready)
                try:
                    answer = await b.generate(max_tokens=3)
                except grpc.aio.AioRpcError as again:
                    if again.code() is not grpc.StatusCode.UNAVAILABLE:
                        raise
                    await asyncio.sleep(0.05)
                else:
                    break
            assert answer.text == "aaa"
            assert not b.service.client.ended.done()

    run(scenario)


def test_a_dead_scheduler_fails_streams_and_a_new_one_is_found(
    model: LoadedModel, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", FOREVER) as b:
            call = b.stub.Generate(request_of())
            await call.read()
            b.scheduler.stop()
            error = await refused(exhausted(call))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert has_retry(status_of(error))
            assert not b.service.client.ready
            assert await health_of(b) == 2
            endpoint = RunDir.open(tmp_path / "run").scheduler_endpoint
            with fake_scheduler.running(FakeScheduler(endpoint, lambda _: list(b"new"))):
                await until(lambda: b.service.client.ready)
                assert (await b.generate(max_tokens=3)).text == "new"

    run(scenario)


def test_a_silent_scheduler_counts_as_gone(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", FOREVER) as b:
            call = b.stub.Generate(request_of())
            await call.read()
            b.scheduler.paused = b.scheduler.silent = True
            error = await refused(exhausted(call))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            b.scheduler.forget_peers()
            b.scheduler.paused = b.scheduler.silent = False
            await until(lambda: b.service.client.ready, timeout=8)
            await until(lambda: b.scheduler.beats > 0)

    run(scenario)


def test_a_new_epoch_fails_streams(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", FOREVER) as b:
            call = b.stub.Generate(request_of())
            await call.read()
            b.scheduler.jobs.clear()
            b.scheduler.epoch += 1
            error = await refused(exhausted(call))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            await until(lambda: b.service.client.ready)
            assert len(b.scheduler.hellos) == 2

    run(scenario)


def test_a_refusal_ends_the_process_with_its_reason(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", refusal="another model") as b:
            assert await asyncio.wait_for(b.service.client.ended, 5) == "another model"

    run(scenario)


def test_stop_drains(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", FOREVER, interval=0.01) as b:
            watch = health_pb2_grpc.HealthStub(b.channel).Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == 1
            call = b.stub.Generate(request_of(max_tokens=50))
            await call.read()
            stopping = asyncio.create_task(b.service.stop(10))
            assert (await watch.read()).status == 2
            error = await refused(b.stub.Generate(request_of()).read())
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert (await exhausted(call)).finish_reason == LENGTH
            started = time.monotonic()
            await stopping
            assert time.monotonic() - started < 2

    run(scenario)


def test_stop_cuts_off_after_the_grace(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", FOREVER) as b:
            call = b.stub.Generate(request_of())
            await call.read()
            await b.service.stop(0.1)
            error = await refused(exhausted(call))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert b.service.client.streams == 0

    run(scenario)


def test_seeds(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", b"abc") as b:
            for _ in range(2):
                await b.generate(max_tokens=1)
            await b.generate(max_tokens=1, seed=0)
            seeds = [submit.params.seed for submit in b.scheduler.submits]
            assert seeds[0] != seeds[1]
            assert seeds[2] == 0
        async with bench(model, tmp_path / "run", b"abc", seed=7) as b:
            await b.generate(max_tokens=1)
            assert b.scheduler.submits[0].params.seed == 7

    run(scenario)
