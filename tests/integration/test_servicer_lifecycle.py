"""How streams of the tokenizer service end early; health, lost schedulers, stopping."""

import asyncio
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
    refused,
    request_of,
    run,
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
            error = await refused(b.stub.Generate(request_of(), timeout=1.0).read())
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
            await until(lambda: len(b.scheduler.aborts) == 1)
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
            b.scheduler.paused, b.scheduler.executor_ready = True, False
            await until(lambda: not b.service.client.ready)
            assert await health_of(b) == 2
            waiting = asyncio.create_task(b.generate(max_tokens=3))
            await until(lambda: len(b.scheduler.submits) == 1)  # the scheduler queues it
            assert not waiting.done()
            b.scheduler.paused, b.scheduler.executor_ready = False, True
            await until(lambda: b.service.client.ready)
            assert await health_of(b) == 1
            assert (await waiting).text == "abc"
            assert len(b.scheduler.submits) == 1

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
            assert "4 schedulers in a row" in (error.details() or "")
            assert len(b.scheduler.submits) == 4
            b.scheduler.torn = False
            assert (await b.generate(max_tokens=3)).text == "aaa"
            assert not b.service.client.ended.done()
            await b.idle()

    run(scenario)


def test_a_new_scheduler_goes_on_where_the_dead_one_stopped(
    model: LoadedModel, tmp_path: Path
) -> None:
    async def scenario() -> None:
        text = bytes(ord("a") + index % 26 for index in range(200))
        async with bench(model, tmp_path / "run", text, most_outputs=50) as b:
            asked = asyncio.create_task(b.generate(max_tokens=200))
            await until(lambda: not b.service.client.connected and b.service.client.streams == 1)
            assert [b.service.client.ready, await health_of(b)] == [False, 2]
            endpoint = RunDir.open(tmp_path / "run").scheduler_endpoint
            with fake_scheduler.running(FakeScheduler(endpoint, lambda _: list(text))) as second:
                assert (await asked).text == text.decode()
                (submit,) = second.submits
                assert submit.accepted
                assert 0 < len(submit.output_token_ids) // 4 <= 50
                assert submit.slot == b.scheduler.submits[0].slot
                assert b.service.client.ready
                stats = b.service.stats().tokenizer
                assert (stats.schedulers_lost_total, stats.choices_resubmitted_total) == (1, 1)

    run(scenario)


def test_a_silent_scheduler_counts_as_gone(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", b"abcdefgh" * 8, interval=0.05) as b:
            asked = asyncio.create_task(b.generate(max_tokens=40))
            await until(lambda: b.scheduler.outputs_sent > 3)
            b.scheduler.paused = b.scheduler.silent = True
            await until(lambda: not b.service.client.connected)
            assert not asked.done()
            b.scheduler.forget_peers()
            b.scheduler.paused = b.scheduler.silent = False
            assert (await asked).text == "abcdefgh" * 5
            await until(lambda: b.scheduler.beats > 0)

    run(scenario)


def test_a_new_epoch_goes_on_with_the_streams(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", b"abcdefgh" * 8, interval=0.02) as b:
            asked = asyncio.create_task(b.generate(max_tokens=60))
            await until(lambda: b.scheduler.outputs_sent > 3)
            b.scheduler.jobs.clear()
            b.scheduler.epoch += 1
            assert (await asked).text == ("abcdefgh" * 8)[:60]
            assert [hello.attempt for hello in b.scheduler.hellos] == [1, 2]

    run(scenario)


def test_a_refusal_ends_the_process_with_its_reason(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", refusal="another model") as b:
            assert await asyncio.wait_for(b.service.client.ended, 30) == "another model"

    run(scenario)


def test_stop_drains(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", FOREVER, interval=0.01) as b:
            watch = health_pb2_grpc.HealthStub(b.channel).Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == 1
            call = b.stub.Generate(request_of(max_tokens=50))
            await call.read()
            stopping = asyncio.create_task(b.service.stop(3600))
            assert (await watch.read()).status == 2
            error = await refused(b.stub.Generate(request_of()).read())
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert (await exhausted(call)).finish_reason == LENGTH
            await asyncio.wait_for(stopping, 30)

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
