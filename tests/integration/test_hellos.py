"""One tokenizer, one scheduler after another: hellos and welcomes, and who is submitted again."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import zmq

import fake_scheduler
from fake_scheduler import FakeScheduler
from tokenizer_bench import run, until
from triptych.engine_core.errors import RequestError, Unavailable
from triptych.services.tokenizer import scheduler_client
from triptych.services.tokenizer.open_choices import OpenChoice
from triptych.services.tokenizer.scheduler_client import SchedulerClient
from triptych.services.tokenizer.scheduler_connection import Beats, SchedulerConnection
from triptych.services.tokenizer.stats import Counters
from triptych.v1 import stage_pb2


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
        async with client_at(endpoint, Beats(0.02, 0.3)) as client:
            with fake_scheduler.running(FakeScheduler(endpoint, lambda _: script)) as first:
                await until(lambda: client.ready)
                first.most_outputs = 20
                sink = Sink()
                client.submit(submit_of(200), [sink])
                await until(lambda: first.dead)
            hellos = client._connection._attempt
            # Silence after silence, and a hello for each.
            await until(lambda: client._connection._attempt >= hellos + 3)
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
        async with client_at(endpoint, Beats(0.05, 60.0)) as client:
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
        async with client_at(endpoint, Beats(0.05, 60.0)) as client:
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
        async with client_at(endpoint, Beats(0.05, 60.0)) as client:
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
        async with client_at(endpoint, Beats(0.05, 60.0)) as client:
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
        async with client_at(endpoint, Beats(0.05, 60.0)) as client:
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
                await asyncio.wait_for(client.ended, 30)

    with router(endpoint) as socket:
        run(lambda: scenario(socket))
