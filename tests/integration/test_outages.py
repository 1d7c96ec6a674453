"""A stage that is missing: who waits, how long, who is told what."""

import asyncio
from pathlib import Path

import grpc
import pytest

import fake_scheduler
from fake_scheduler import FakeScheduler
from http_bench import http_bench
from tokenizer_bench import (
    FOREVER,
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
from triptych.services.runtime.stage_states import remove_states, write_states
from triptych.services.tokenizer.server import LoadedModel, TokenizerService
from triptych.services.tokenizer.settings import TokenizerSettings
from triptych.v1 import control_pb2, control_pb2_grpc, inference_pb2_grpc


def states(reason: str) -> control_pb2.SupervisorStats:
    stage = control_pb2.StageState(
        name="executor", state=control_pb2.StageState.STATE_CRASH_LOOP, reason=reason
    )
    return control_pb2.SupervisorStats(stages=[stage])


def test_before_the_engine_was_ready_nothing_waits(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        (tmp_path / "run").mkdir(mode=0o700)
        run_dir = RunDir.open(tmp_path / "run")
        settings = TokenizerSettings(
            model="m", run_dir=str(run_dir.path), port=0, http=False, heartbeat_interval=0.05
        )
        service = TokenizerService(settings, run_dir, model)
        await service.start()
        try:
            async with grpc.aio.insecure_channel(service.address) as channel:
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                error = await refused(stub.Generate(request_of()).read())
                assert error.code() is grpc.StatusCode.UNAVAILABLE
                assert error.details() == "the engine is starting"
                assert has_retry(status_of(error))
                run_dir.lock("supervisor")
                write_states(run_dir, states("it ended 5 times in a row"))
                await until(lambda: "5 times" in service.reason)
                error = await refused(stub.Generate(request_of()).read())
                assert error.details() == "executor: it ended 5 times in a row"
        finally:
            await service.stop(0.0)

    run(scenario)


async def lose(b: Bench) -> None:
    b.scheduler.stop()
    await until(lambda: not b.service.client.connected)


def test_nobody_waits_longer_than_recovery_timeout(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", FOREVER, recovery_timeout=100) as b:
            call = b.stub.Generate(request_of(n=2))
            await call.read()
            await lose(b)
            held = b.stub.Generate(request_of())
            await until(lambda: b.service.client.streams == 3)
            b.service.client._outage._timeout = 0.5
            for each in (call, held):
                error = await refused(exhausted(each))
                assert error.code() is grpc.StatusCode.UNAVAILABLE
                assert "the scheduler is gone, for longer than" in (error.details() or "")
                assert has_retry(status_of(error))
            error = await refused(b.stub.Generate(request_of()).read())
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            await until(lambda: b.service.stats().tokenizer.requests_running == 0)
            endpoint = RunDir.open(tmp_path / "run").scheduler_endpoint
            with fake_scheduler.running(FakeScheduler(endpoint, lambda _: FOREVER)) as new:
                await until(lambda: b.service.client.ready)
                assert (await b.generate(max_tokens=3)).text == "aaa"
                assert len(new.submits) == 1

    run(scenario)


def test_an_executor_that_stays_away_ends_what_the_scheduler_has(
    model: LoadedModel, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", FOREVER, recovery_timeout=0.4) as b:
            call = b.stub.Generate(request_of())
            await call.read()
            b.scheduler.paused, b.scheduler.executor_ready = True, False
            error = await refused(exhausted(call))
            assert "the executor is gone" in (error.details() or "")
            await until(lambda: b.scheduler.aborts == [b.scheduler.submits[0].slot])
            b.scheduler.paused, b.scheduler.executor_ready = False, True
            await until(lambda: b.service.client.ready)
            assert (await b.generate(max_tokens=3)).text == "aaa"

    run(scenario)


def test_without_recovery_streams_end_at_once(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", FOREVER, recovery_timeout=0) as b:
            call = b.stub.Generate(request_of())
            await call.read()
            b.scheduler.stop()
            error = await refused(exhausted(call))
            assert error.code() is grpc.StatusCode.UNAVAILABLE

    run(scenario)


def test_what_the_supervisor_knows_ends_all_waiting(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with http_bench(model, tmp_path / "run", FOREVER) as b:
            run_dir = RunDir.open(tmp_path / "run")
            lock = run_dir.lock("supervisor")
            write_states(run_dir, states("it ended 5 times in a row"))
            call = b.behind.stub.Generate(request_of())
            await call.read()  # nothing is asked while steps are made
            await lose(b.behind)
            error = await refused(exhausted(call))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert error.details() == "executor: it ended 5 times in a row"
            answer = await b.complete()
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["message"] == "executor: it ended 5 times in a row"
            health = await b.client.get("/health")
            assert health.status_code == 503
            assert health.json() == {"reason": "executor: it ended 5 times in a row"}
            ready = await b.client.get("/ready")
            assert (ready.status_code, ready.json()["reason"]) == (503, health.json()["reason"])
            remove_states(run_dir)
            assert lock
            await until(lambda: b.behind.service.reason == "the scheduler is gone")
            waiting = asyncio.create_task(b.complete(max_tokens=2))
            await until(lambda: b.behind.service.client.streams == 1)
            endpoint = run_dir.scheduler_endpoint
            with fake_scheduler.running(FakeScheduler(endpoint, lambda _: FOREVER)):
                assert (await waiting).json()["choices"][0]["text"] == "aa"

    run(scenario)


@pytest.mark.parametrize("name", ["timeout_ms", "queue_timeout_ms"])
def test_time_outs_pass_while_the_engine_recovers(
    model: LoadedModel, tmp_path: Path, name: str
) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run", FOREVER) as b:
            await lose(b)
            request = request_of()
            setattr(request, name, 200)
            error = await refused(b.stub.Generate(request).read())
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert name in (error.details() or "")
            call = b.stub.Generate(request_of(), timeout=0.2)
            error = await refused(call.read())
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await until(lambda: b.service.client.streams == 0)

    run(scenario)


def test_the_deadline_of_a_call_reaches_the_scheduler(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(model, tmp_path / "run") as b:
            async for _ in b.stub.Generate(request_of(max_tokens=1), timeout=50):
                pass
            async for _ in b.stub.Generate(request_of(max_tokens=1)):
                pass
            first, second = b.scheduler.submits
            assert 20_000 < first.deadline_ms < 51_000
            assert second.deadline_ms == 0
            assert first.timeout_ms == second.timeout_ms == 0

    run(scenario)


def test_drain_and_resume(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with http_bench(model, tmp_path / "run", FOREVER, interval=0.01) as b:
            target = f"unix:{RunDir.open(tmp_path / 'run').control_socket('tokenizer-0')}"
            async with grpc.aio.insecure_channel(target) as channel:
                control = control_pb2_grpc.ControlServiceStub(channel)
                open_call = b.behind.stub.Generate(request_of(max_tokens=100))
                await open_call.read()
                b.scheduler.paused = True
                drained = await control.Drain(control_pb2.DrainRequest(grace_ms=50))
                assert drained.requests_running == 1
                assert b.behind.service.stats().tokenizer.draining
                error = await refused(b.behind.stub.Generate(request_of()).read())
                assert error.code() is grpc.StatusCode.UNAVAILABLE
                assert has_retry(status_of(error))
                answer = await b.complete()
                assert answer.status_code == 503
                assert "retry-after" in answer.headers
                assert (await b.client.get("/health")).json() == {"reason": "draining"}
                page = (await b.client.get("/metrics")).text
                assert 'triptych:draining{model_name="tiny"} 1.0' in page
                assert 'triptych:schedulers_lost_total{model_name="tiny"} 0.0' in page
                assert 'triptych:choices_resubmitted_total{model_name="tiny"} 0.0' in page
                b.scheduler.paused = False
                assert (await exhausted(open_call)).finish_reason
                drained = await control.Drain(control_pb2.DrainRequest())
                assert drained.requests_running == 0
                await control.Resume(control_pb2.ResumeRequest())
                assert (await b.client.get("/health")).status_code == 200
                assert (await b.complete(max_tokens=2)).json()["choices"][0]["text"] == "aa"

    run(scenario)
