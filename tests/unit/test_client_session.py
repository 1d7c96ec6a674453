"""Sessions of the synchronous client against a scripted service."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import cast

import grpc
import pytest

from fake_engine import Act, FakeEngine, fake_engine, told
from triptych.client import blocking_session
from triptych.client.api import (
    Cancelled,
    ChatResponse,
    Client,
    ClientOptions,
    DeadlineExceeded,
    InvalidRequest,
    RetryPolicy,
    SlowReader,
    TriptychError,
    Unavailable,
)
from triptych.engine_core import errors as engine_errors
from triptych.v1 import common_pb2, inference_pb2, inference_pb2_grpc

QUICK = RetryPolicy(attempts=3, first_wait=0.001, longest_wait=0.002)


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with fake_engine() as engine:
        yield engine


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[Client]:
    with Client(engine.address, ClientOptions(timeout=60, retry=QUICK)) as client:
        yield client


def test_requests_share_a_stream_and_are_read_in_any_order(
    engine: FakeEngine, client: Client
) -> None:
    chat = ChatResponse(text="hi", finish_reason=common_pb2.FINISH_REASON_STOP)
    chat.usage.completion_tokens = 1
    engine.expect(Act(told("first", 2)), Act(told("second", 3)), Act([chat]))
    with client.session() as session:
        streams = [session.generate("1"), session.generate("2")]
        talk = session.chat("3")
        assert talk.answer().text == "hi"
        assert [stream.answer().text for stream in reversed(streams)] == ["second", "first"]
    assert engine.sessions == 1


def test_a_deadline_goes_along_as_a_time_out(engine: FakeEngine, client: Client) -> None:
    engine.expect(Act(told("ok")), Act(told("ok")), Act(told("on", end=False)))
    own = inference_pb2.GenerateRequest(text="x", timeout_ms=5)
    with client.session() as session:
        session.generate("x", timeout=30).answer()
        session.generate(own, timeout=30).answer()
        assert 10_000 <= engine.requests[0].timeout_ms <= 30_000
        assert engine.requests[1].timeout_ms <= 5
        stream = session.generate("x", timeout=1.5)
        next(stream)
        with pytest.raises(DeadlineExceeded):
            next(stream)
        assert engine.session_cancels.get(timeout=30) == 3


def test_a_request_that_fails_leaves_the_others_alone(engine: FakeEngine, client: Client) -> None:
    engine.expect(
        Act(error=engine_errors.InvalidRequest("text", "is empty")),
        Act(told("half", end=False), error=engine_errors.Unavailable("down", retry_after_ms=1)),
        Act(told("half and whole")),
    )
    with client.session() as session:
        bad, good = session.generate(""), session.generate("x")
        with pytest.raises(InvalidRequest, match="text: is empty"):
            next(bad)
        assert good.answer().text == "half and whole"
    assert engine.sessions == 1


def test_a_session_that_breaks_goes_on_over_a_new_stream(
    engine: FakeEngine, client: Client
) -> None:
    engine.expect(
        Act(told("abc", end=False), bare=grpc.StatusCode.UNAVAILABLE), Act(told("abcdef", 2))
    )
    with client.session() as session:
        assert session.generate("x").answer().text == "abcdef"
    assert engine.sessions == 2


def test_cancel_by_id(engine: FakeEngine, client: Client) -> None:
    engine.expect(Act(told("abc", end=False)), Act(told("ok")))
    with client.session() as session:
        stream = session.generate("x")
        next(stream)
        stream.cancel()
        with pytest.raises(Cancelled):
            next(stream)
        assert engine.session_cancels.get(timeout=30) == 1
        assert session.generate("y").answer().text == "ok"


def test_a_stream_that_nobody_holds_is_cancelled(engine: FakeEngine, client: Client) -> None:
    engine.expect(Act(told("abc", end=False)))
    with client.session() as session:
        for _ in session.generate("x"):
            break
        assert engine.session_cancels.get(timeout=30) == 1


def test_leaving_a_session_ends_its_requests(engine: FakeEngine, client: Client) -> None:
    engine.expect(Act(told("abc", end=False)))
    with client.session() as session:
        stream = session.generate("x")
        next(stream)
    with pytest.raises(Cancelled):
        next(stream)
    with pytest.raises(Cancelled):
        session.generate("y")


def test_what_nobody_reads_is_bounded(
    engine: FakeEngine, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocking_session, "MAX_UNREAD", 3)
    engine.expect(Act(told("abcdefgh", 1, 2, 3, 4, 5, 6, 7)))
    with client.session() as session:
        stream = session.generate("x")
        assert engine.session_cancels.get(timeout=30) == 1
        with pytest.raises(SlowReader):
            list(stream)


def test_nothing_listens() -> None:
    with (
        Client("127.0.0.1:1", ClientOptions(retry=QUICK)) as client,
        client.session() as session,
        pytest.raises(Unavailable),
    ):
        session.generate("x").answer()


class _Collecting(SimpleQueue[inference_pb2.SessionEvent | TriptychError]):
    """During whose `put` the garbage collector ends other streams, in the same thread."""

    ended: tuple[Callable[[], object], ...] = ()

    def put(
        self,
        item: inference_pb2.SessionEvent | TriptychError,
        block: bool = True,
        timeout: float | None = None,
    ) -> None:
        for end in self.ended:
            end()
        super().put(item)


@dataclass
class _Inbox:
    call_id: int
    items: SimpleQueue[inference_pb2.SessionEvent | TriptychError] = field(
        default_factory=_Collecting
    )

    def ends(self, *ended: Callable[[], object]) -> None:
        assert isinstance(self.items, _Collecting)
        self.items.ended = ended


def test_streams_that_the_garbage_collector_ends_stop_nobody() -> None:
    """It may run in the session's own thread, while that delivers."""

    class Stub:
        def Session(  # noqa: N802
            self, requests: Iterator[object], metadata: object
        ) -> Iterator[inference_pb2.SessionResponse]:
            started.wait(20)
            yield inference_pb2.SessionResponse(events=[inference_pb2.SessionEvent(id=1)])
            # It breaks: all that are left are told.

    started = threading.Event()
    stub = cast(inference_pb2_grpc.InferenceServiceStub, Stub())
    wire = blocking_session._Wire(stub, ())
    inboxes = [_Inbox(call_id) for call_id in (1, 2, 3, 4)]
    for inbox in inboxes:
        wire.start(inbox, inference_pb2.SessionRequest())
    inboxes[0].ends(lambda: wire.cancel(2), lambda: wire.cancel(1))
    inboxes[2].ends(lambda: wire.cancel(4), lambda: wire.cancel(3))
    started.set()
    assert isinstance(inboxes[2].items.get(timeout=20), Unavailable)
    assert isinstance(inboxes[0].items.get(timeout=20), inference_pb2.SessionEvent)
    assert inboxes[1].items.empty()
