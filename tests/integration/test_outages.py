"""A stage that is missing: who waits, how long, who is told what, and what counts as its return."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import grpc
import pytest
import zmq

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
from triptych.engine_core.errors import RequestError, Unavailable
from triptych.services.runtime.run_dir import RunDir
from triptych.services.runtime.stage_states import remove_states, write_states
from triptych.services.tokenizer import scheduler_client
from triptych.services.tokenizer.open_choices import OpenChoice
from triptych.services.tokenizer.scheduler_client import SchedulerClient
from triptych.services.tokenizer.scheduler_connection import Beats, SchedulerConnection
from triptych.services.tokenizer.server import LoadedModel, TokenizerService
from triptych.services.tokenizer.settings import TokenizerSettings
from triptych.services.tokenizer.stats import Counters
from triptych.v1 import control_pb2, control_pb2_grpc, inference_pb2_grpc, stage_pb2


class Sink:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.error: RequestError | None = None

    def started(self, cached_tokens: int) -> None:
        pass

    def prompt_logprobs(self, position: int, rows: object) -> None:
        pass

    def scored(self, score: float) -> None:
        pass

    def accept(self, token_id: int, finish: int, logprobs: object) -> bool:
        self.tokens.append(token_id)
        return False

    def fail(self, error: RequestError) -> None:
        self.error = error

    def wake(self) -> None:
        pass


def submit_of(max_tokens: int) -> stage_pb2.Submit:
    submit = stage_pb2.Submit(prompt_token_ids=bytes(4))
    submit.params.n, submit.params.max_tokens = 1, max_tokens
    return submit


@asynccontextmanager
async def client_at(endpoint: str, beats: Beats) -> AsyncIterator[SchedulerClient]:
    hello = stage_pb2.TokenizerHello(fingerprint="print", vocabulary_size=320)
    client = SchedulerClient(SchedulerConnection(endpoint, hello, beats), Counters(), lambda: None)
    client.start()
    try:
        yield client
    finally:
        client.stop()


def test_hellos_that_wait_for_a_scheduler_do_not_undo_one_another(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path / 'scheduler.zmq'}"
    script = list(range(200))

    async def scenario() -> None:
        async with client_at(endpoint, Beats(0.02, 0.1)) as client:
            with fake_scheduler.running(FakeScheduler(endpoint, lambda _: script)) as first:
                await until(lambda: client.ready)
                first.most_outputs = 20
                sink = Sink()
                client.submit(submit_of(200), [sink])
                await until(lambda: first.dead)
            await asyncio.sleep(0.5)  # silence after silence, and a hello for each
            with fake_scheduler.running(FakeScheduler(endpoint, lambda _: script)) as second:
                await until(lambda: sink.tokens == script)
            attempts = [hello.attempt for hello in second.hellos]
            assert len(attempts) >= 3
            assert attempts == list(range(attempts[0], attempts[0] + len(attempts)))
            assert len(second.submits) == 1
            assert sink.error is None

    run(scenario)


@contextmanager
def router(endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(endpoint)
        yield socket


async def heard(socket: zmq.Socket[bytes], kind: str) -> tuple[bytes, stage_pb2.TokenizerMessage]:
    """The next message of a kind."""
    while True:
        await until(lambda: bool(socket.poll(0)))
        peer, frame = socket.recv_multipart()
        message = stage_pb2.TokenizerMessage.FromString(frame)
        if message.WhichOneof("message") == kind:
            return peer, message


def welcome(attempt: int, epoch: int = 7) -> stage_pb2.TokenizerReply:
    model = stage_pb2.ModelFacts(architecture="llama", vocabulary_size=320, max_model_len=64)
    return stage_pb2.TokenizerReply(
        welcome=stage_pb2.TokenizerWelcome(
            epoch=epoch, model=model, max_sequence_len=64, attempt=attempt
        )
    )


def token(slot: int, token_id: int) -> stage_pb2.TokenizerReply:
    outputs = stage_pb2.StepOutputs(
        slots=slot.to_bytes(4, "little"),
        token_ids=token_id.to_bytes(4, "little"),
        finish_reasons=b"\0",
    )
    return stage_pb2.TokenizerReply(outputs=outputs)


def beat(epoch: int, *, ready: bool = True) -> stage_pb2.TokenizerReply:
    return stage_pb2.TokenizerReply(beat=stage_pb2.SchedulerBeat(epoch=epoch, executor_ready=ready))


def test_what_belongs_to_an_earlier_hello_is_dropped(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path / 'scheduler.zmq'}"

    async def scenario(socket: zmq.Socket[bytes]) -> None:
        async with client_at(endpoint, Beats(0.05, 5.0)) as client:
            peer, hello = await heard(socket, "hello")

            def say(*replies: stage_pb2.TokenizerReply) -> None:
                for reply in replies:
                    socket.send_multipart([peer, reply.SerializeToString()])

            assert hello.hello.attempt == 1
            say(welcome(1))
            await until(lambda: client.ready)
            sink = Sink()
            (slot,) = client.submit(submit_of(9), [sink])
            await heard(socket, "submit")
            say(token(slot, 10), beat(0))  # it took the tokenizer for dead
            _, hello = await heard(socket, "hello")
            assert hello.hello.attempt == 2
            assert not client.connected
            # Still on their way: a welcome, a token and a beat for the first hello.
            say(welcome(1), token(slot, 11), beat(7, ready=False), token(slot, 12))
            await asyncio.sleep(0.2)
            assert not client.connected
            assert sink.tokens == [10]
            say(welcome(2), token(slot, 20))
            await until(lambda: client.ready and sink.tokens == [10, 20])
            _, again = await heard(socket, "submit")
            assert again.submit.accepted
            assert again.submit.output_token_ids == (10).to_bytes(4, "little")
            assert again.submit.slot == slot
            say(welcome(2))  # another pool, the same scheduler
            say(token(slot, 21))
            await until(lambda: sink.tokens == [10, 20, 21])
            client.abort([slot])
            _, message = await heard(socket, "abort")
            assert list(message.abort.slots) == [slot]

    with router(endpoint) as socket:
        run(lambda: scenario(socket))


def test_a_hello_for_which_there_is_no_room_is_said_later(tmp_path: Path) -> None:
    """Thousands of frames wait in the socket of a scheduler that was frozen."""
    endpoint = f"ipc://{tmp_path / 'scheduler.zmq'}"

    async def scenario(socket: zmq.Socket[bytes]) -> None:
        async with client_at(endpoint, Beats(0.05, 5.0)) as client:
            peer, _ = await heard(socket, "hello")
            socket.send_multipart([peer, welcome(1).SerializeToString()])
            await until(lambda: client.ready)
            channel = client._connection._channel
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(channel, "send", lambda message: False)
                # Not even a second welcome of the hello that is over counts now.
                for reply in (beat(0), welcome(1)):
                    socket.send_multipart([peer, reply.SerializeToString()])
                await until(lambda: not client.connected)
                await asyncio.sleep(0.2)
                assert not client.connected
            _, hello = await heard(socket, "hello")
            assert hello.hello.attempt == 2
            socket.send_multipart([peer, welcome(2).SerializeToString()])
            await until(lambda: client.ready)

    with router(endpoint) as socket:
        run(lambda: scenario(socket))


def test_four_schedulers_without_a_token_end_a_choice_and_no_other(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path / 'scheduler.zmq'}"

    async def scenario(socket: zmq.Socket[bytes]) -> None:
        async with client_at(endpoint, Beats(0.05, 5.0)) as client:
            deadly, lucky = Sink(), Sink()
            for attempt in range(1, 6):
                peer, hello = await heard(socket, "hello")
                assert hello.hello.attempt == attempt
                socket.send_multipart([peer, welcome(attempt).SerializeToString()])
                await until(lambda: client.ready)
                if attempt == 1:
                    client.submit(submit_of(9), [deadly])
                    client.submit(submit_of(9), [lucky])
                elif attempt == 3:
                    socket.send_multipart([peer, token(2, 33).SerializeToString()])
                    await until(lambda: lucky.tokens == [33])
                for slot in (1, 2) if attempt < 5 else (2,):
                    _, submitted = await heard(socket, "submit")
                    assert submitted.submit.slot == slot
                assert (deadly.error is None) == (attempt < 5)
                socket.send_multipart([peer, beat(0).SerializeToString()])
            assert isinstance(deadly.error, Unavailable)
            assert "4 schedulers in a row" in str(deadly.error)
            assert lucky.error is None

    with router(endpoint) as socket:
        run(lambda: scenario(socket))


def test_schedulers_that_lived_long_did_not_die_of_what_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt may wait, or be computed, for minutes: deaths that are far apart end nothing."""
    monkeypatch.setattr(scheduler_client, "_YOUNG", 0.0)
    endpoint = f"ipc://{tmp_path / 'scheduler.zmq'}"

    async def scenario(socket: zmq.Socket[bytes]) -> None:
        async with client_at(endpoint, Beats(0.05, 5.0)) as client:
            patient = Sink()
            for attempt in range(1, 8):
                peer, _ = await heard(socket, "hello")
                socket.send_multipart([peer, welcome(attempt).SerializeToString()])
                await until(lambda: client.ready)
                if attempt == 1:
                    client.submit(submit_of(9), [patient])
                await heard(socket, "submit")
                last = token(1, 33) if attempt == 7 else beat(0)
                socket.send_multipart([peer, last.SerializeToString()])
            await until(lambda: patient.tokens == [33])
            assert patient.error is None

    with router(endpoint) as socket:
        run(lambda: scenario(socket))


def test_a_bug_in_a_resubmission_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And does not leave the choices behind it waiting for ever."""
    endpoint = f"ipc://{tmp_path / 'scheduler.zmq'}"
    monkeypatch.setattr(scheduler_client, "_PARTS", 1)

    def broken(choice: OpenChoice, now: float) -> stage_pb2.Submit:
        raise AssertionError("a bug")

    async def scenario(socket: zmq.Socket[bytes]) -> None:
        async with client_at(endpoint, Beats(0.05, 5.0)) as client:
            peer, _ = await heard(socket, "hello")

            def say(reply: stage_pb2.TokenizerReply) -> None:
                socket.send_multipart([peer, reply.SerializeToString()])

            say(welcome(1))
            await until(lambda: client.ready)
            sinks = [Sink(), Sink()]
            for sink in sinks:
                client.submit(submit_of(9), [sink])
            say(token(2, 33))  # the second one goes on alone, in a turn of its own
            await until(lambda: sinks[1].tokens == [33])
            monkeypatch.setattr(OpenChoice, "message", broken)
            say(beat(0))
            await heard(socket, "hello")
            say(welcome(2))
            with pytest.raises(AssertionError, match="a bug"):
                await asyncio.wait_for(client.ended, 10)

    with router(endpoint) as socket:
        run(lambda: scenario(socket))


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
        async with bench(model, tmp_path / "run", FOREVER, recovery_timeout=0.5) as b:
            call = b.stub.Generate(request_of(n=2))
            await call.read()
            await lose(b)
            held = b.stub.Generate(request_of())
            await until(lambda: b.service.client.streams == 3)
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
            async for _ in b.stub.Generate(request_of(max_tokens=1), timeout=5):
                pass
            async for _ in b.stub.Generate(request_of(max_tokens=1)):
                pass
            first, second = b.scheduler.submits
            assert 4000 < first.deadline_ms < 6000
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
                assert (await exhausted(open_call)).finish_reason
                drained = await control.Drain(control_pb2.DrainRequest())
                assert drained.requests_running == 0
                await control.Resume(control_pb2.ResumeRequest())
                assert (await b.client.get("/health")).status_code == 200
                assert (await b.complete(max_tokens=2)).json()["choices"][0]["text"] == "aa"

    run(scenario)
