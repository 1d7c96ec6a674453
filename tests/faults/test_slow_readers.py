"""A reader that does not read: its work ends at max_unread_tokens beside what the transport keeps,
it is told why by name, and nobody else is slower for it (R67, R68)."""

import queue
import signal
from collections.abc import Iterator

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from engine import Engine
from grpc_errors import refused
from leaving import GrpcCall, HttpCall, Leaving, Wanted, figures, unharmed_engine, until
from raw_http import RawHttp, request_bytes
from scripted_models import T1_FIRST_PIECE, T1_VOCABULARY, write_s1_markov, write_t1_tokenizer
from stream_client import client_process
from triptych.v1 import inference_pb2

pytestmark = pytest.mark.faults

LONG = T1_FIRST_PIECE
PIECE = 8_000  # characters of that token, so that the transport's buffers fill soon
UNREAD = 250
TOKENS = 6000
SLOW = Wanted(prompt=(LONG,), max_tokens=TOKENS)
STEADY = Wanted(prompt=(ord("a"),), max_tokens=300)
BUFFERED = 16 << 20
"""Bytes that sockets, gRPC and uvicorn may keep of one stream: what Linux lets both ends of a
connection grow to, and then some."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """LONG is followed by itself, a letter by the next one."""
    folder = tmp_path_factory.mktemp("slow")
    table = np.zeros((T1_VOCABULARY, T1_VOCABULARY))
    table[np.arange(T1_VOCABULARY), (np.arange(T1_VOCABULARY) + 1) % 256] = 1.0
    table[LONG] = 0.0
    table[LONG, LONG] = 1.0
    write_t1_tokenizer(folder / "model", ["z" * PIECE])
    write_s1_markov(folder / "model", table, max_position_embeddings=8192)
    flags = ("--kv-cache-memory", "64MiB", "--cpu-threads", "1", "--max-num-seqs", "32",
             "--max-num-batched-tokens", "64", "--max-unread-tokens", str(UNREAD))  # fmt: skip
    with unharmed_engine(folder / "model", folder / "run", *flags) as engine:
        yield engine


class Sessions:
    """Slow requests of one session."""

    def __init__(self, engine: Engine, count: int) -> None:
        self.actions: queue.Queue[inference_pb2.SessionRequest | None] = queue.Queue()
        for number in range(count):
            self.start(number, SLOW)
        self.call = engine.stub.Session(iter(self.actions.get, None), timeout=120)
        self.errors: dict[int, bytes] = {}
        self.ids: dict[int, list[int]] = {}
        self.read()

    def start(self, number: int, wanted: Wanted) -> None:
        start = inference_pb2.SessionStart(id=number, generate=wanted.over_grpc())
        self.actions.put(inference_pb2.SessionRequest(start=start))

    def read(self) -> None:
        for event in next(self.call).events:
            self.ids.setdefault(event.id, []).extend(event.output.token_ids)
            if event.HasField("error"):
                assert event.id not in self.errors
                self.errors[event.id] = event.error.status

    def end(self) -> None:
        self.actions.put(None)
        assert next(self.call, None) is None


def reason(status: bytes) -> str:
    details = status_pb2.Status.FromString(status).details
    info = error_details_pb2.ErrorInfo()
    assert details[0].Unpack(info)
    return str(info.reason)


def slow_http(engine: Engine) -> RawHttp:
    http = RawHttp(engine, receive_buffer=1 << 16)
    http.send(request_bytes("/v1/completions", SLOW.over_http(stream=True)))
    http.read_until(b"data: ")
    return http


def whole(engine: Engine, wanted: Wanted) -> list[int]:
    call = GrpcCall(engine, wanted)
    while call.read():
        pass
    assert call.code is grpc.StatusCode.OK
    return call.ids


def bounded(engine: Engine, streams: int, drawn: int) -> None:
    """Assert what was drawn for so many streams since `drawn`."""
    tokens = figures(engine).generated_tokens_total - drawn
    assert tokens <= streams * (UNREAD + BUFFERED // PIECE + 10)
    assert tokens < streams * TOKENS


def test_over_grpc(engine: Engine) -> None:
    before = engine.wait_idle()
    call = engine.stub.Generate(SLOW.over_grpc(), timeout=60)
    next(call)
    until(lambda: figures(engine).requests_aborted_total > before.requests_aborted_total)
    assert not figures(engine).requests_tracked
    bounded(engine, 1, before.generated_tokens_total)
    error = refused(lambda: list(call))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert f"more than {UNREAD} tokens" in error.details()
    status = rpc_status.from_call(error)
    assert status is not None
    assert reason(status.SerializeToString()) == "SLOW_READER"
    engine.wait_idle()


def test_over_http(engine: Engine) -> None:
    before = engine.wait_idle()
    http = slow_http(engine)
    until(lambda: figures(engine).requests_aborted_total > before.requests_aborted_total)
    assert not figures(engine).requests_tracked
    bounded(engine, 1, before.generated_tokens_total)
    http.read_until(b"\r\n0\r\n\r\n")
    *events, last = http.events()
    http.fin()
    assert set(last) == {"error"}
    assert last["error"]["code"] == "slow_reader"
    assert all(event["choices"][0]["finish_reason"] is None for event in events)
    assert sum("error" in event for event in events) == 0
    assert b"[DONE]" not in http.received
    engine.wait_idle()


def test_in_a_session(engine: Engine) -> None:
    before = engine.wait_idle()
    session = Sessions(engine, 4)
    until(lambda: figures(engine).requests_aborted_total == before.requests_aborted_total + 4)
    bounded(engine, 4, before.generated_tokens_total)
    while len(session.errors) < 4:
        session.read()
    assert {reason(status) for status in session.errors.values()} == {"SLOW_READER"}
    session.start(9, STEADY)  # it goes on
    while len(session.ids.get(9, ())) < STEADY.max_tokens:
        session.read()
    session.end()
    engine.wait_idle()


def test_many_at_once_slow_nobody(engine: Engine) -> None:
    """24 of them by all doors; others are served meanwhile, on their connection too, and with a
    token in each step while they are there and wait."""
    expected = whole(engine, STEADY)
    before = engine.wait_idle()
    memory = engine.stats("tokenizer-0").process.resident_bytes
    calls = [engine.stub.Generate(SLOW.over_grpc(), timeout=120) for _ in range(8)]
    for call in calls:
        next(call)
    https = [slow_http(engine) for _ in range(8)]
    session = Sessions(engine, 8)
    steady: list[Leaving] = [
        GrpcCall(engine, STEADY), HttpCall(engine, STEADY, "fin", stream=True)
    ]  # fmt: skip
    for each in steady:
        while each.read():
            pass
        assert each.ids == expected
        each.leave()
    until(lambda: figures(engine).requests_aborted_total == before.requests_aborted_total + 24)
    assert not figures(engine).requests_tracked
    bounded(engine, 24, before.generated_tokens_total)
    begun = figures(engine).steps_total
    assert whole(engine, STEADY) == expected
    assert figures(engine).steps_total - begun <= STEADY.max_tokens + 1
    grown = engine.stats("tokenizer-0").process.resident_bytes - memory
    assert grown < 24 * (2 * UNREAD * PIECE + (1 << 20))
    for call in calls:
        call.cancel()
    for http in https:
        http.fin()
    session.call.cancel()
    session.actions.put(None)
    engine.wait_idle()
    assert whole(engine, STEADY) == expected


@pytest.mark.parametrize(("door", "end"), [("grpc", "RESOURCE_EXHAUSTED"), ("http", "slow_reader")])
def test_a_frozen_client(engine: Engine, door: str, end: str) -> None:
    """A debugger, a laptop's lid: it hears why when it goes on soon enough."""
    aborted = engine.wait_idle().requests_aborted_total
    with client_process(engine, door, 3, TOKENS, SLOW.prompt) as client:
        client.process.send_signal(signal.SIGSTOP)
        until(lambda: figures(engine).requests_aborted_total == aborted + 3)
        assert not figures(engine).requests_tracked
        assert whole(engine, STEADY)
        client.process.send_signal(signal.SIGCONT)
        assert client.line() == " ".join([end] * 3)
    engine.wait_idle()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("door", ["grpc", "http"])
def test_a_killed_client(engine: Engine, door: str, frozen: bool) -> None:
    aborted = engine.wait_idle().requests_aborted_total
    with client_process(engine, door, 3, TOKENS, SLOW.prompt) as client:
        if frozen:
            client.process.send_signal(signal.SIGSTOP)
            until(lambda: figures(engine).requests_aborted_total == aborted + 3)
            assert engine.stats("tokenizer-0").tokenizer.requests_running == 3
        client.process.kill()
        client.process.wait(10)
        assert engine.wait_idle().requests_aborted_total == aborted + 3
    assert whole(engine, STEADY)
