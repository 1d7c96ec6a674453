"""Many requests on one stream: blocking."""

import queue
import threading
from types import TracebackType
from typing import Generic, Protocol, Self

import grpc

from triptych.client.attempts import Attempts, RequestT, deadline_of, remaining
from triptych.client.blocking_stream import Stream
from triptych.client.errors import (
    TriptychError,
    cancelled,
    cut_off,
    deadline_exceeded,
    from_rpc_error,
)
from triptych.client.options import ClientOptions
from triptych.client.pauses import Pause
from triptych.client.received import ResponseT
from triptych.client.requests import Messages, Prompt, chat_request, generate_request
from triptych.client.session_events import (
    MAX_UNREAD,
    Reading,
    cancel_of,
    chat_of,
    is_last,
    output_of,
    start_of,
    too_slow,
)
from triptych.v1 import common_pb2, inference_pb2, inference_pb2_grpc

_CLOSING_SECONDS = 5.0


class Session:
    """Requests that share one stream: the cheap form for many of them, from any thread.

    Made by `Client.session`. Use it as a context: leaving it cancels what still runs. When its
    stream breaks, its requests go on over a new one, as those of the client do.
    """

    def __init__(
        self,
        stub: inference_pb2_grpc.InferenceServiceStub,
        options: ClientOptions,
        pause: Pause,
    ) -> None:
        self._stub = stub
        self._options = options
        self._pause = pause
        self._lock = threading.Lock()
        self._wire: _Wire | None = None
        self._closed = False
        self._last_id = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what runs and end the stream."""
        with self._lock:
            self._closed = True
            wire = self._wire
        if wire is not None:
            wire.close()

    def generate(
        self,
        prompt: Prompt,
        params: common_pb2.SamplingParams | None = None,
        *,
        model: str = "",
        timeout: float | None = None,
    ) -> Stream[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]:
        """As `Client.generate`."""
        return self._stream(generate_request(prompt, params, model), output_of, timeout)

    def chat(
        self,
        messages: Messages,
        params: common_pb2.SamplingParams | None = None,
        *,
        model: str = "",
        timeout: float | None = None,
    ) -> Stream[inference_pb2.ChatRequest, inference_pb2.ChatResponse]:
        """As `Client.chat`."""
        return self._stream(chat_request(messages, params, model), chat_of, timeout)

    def _stream(
        self, request: RequestT, reading: Reading[ResponseT], timeout: float | None
    ) -> Stream[RequestT, ResponseT]:
        attempts: Attempts[RequestT, ResponseT] = Attempts(request, self._options, timeout)

        def opening(request: RequestT, seconds: float | None) -> _SessionCall[ResponseT]:
            wire, call_id = self._open_wire()
            call = _SessionCall(wire, call_id, reading, seconds)
            wire.start(call, start_of(call_id, request, seconds))
            return call

        return Stream(opening, attempts, self._pause)

    def _open_wire(self) -> "tuple[_Wire, int]":
        """The stream, a new one where it broke, and an id that was never used on it."""
        with self._lock:
            if self._closed:
                raise cancelled()
            if self._wire is None or self._wire.broken:
                self._wire = _Wire(self._stub, self._options.metadata)
            self._last_id += 1
            return self._wire, self._last_id


class _Inbox(Protocol):
    """Where a wire puts what came for one request."""

    call_id: int
    items: "queue.SimpleQueue[inference_pb2.SessionEvent | TriptychError]"


class _Wire:
    """One Session RPC. A thread reads it and puts each event where its request waits."""

    def __init__(
        self,
        stub: inference_pb2_grpc.InferenceServiceStub,
        metadata: tuple[tuple[str, str], ...],
    ) -> None:
        self._outgoing: queue.SimpleQueue[inference_pb2.SessionRequest | None] = queue.SimpleQueue()
        # Reentrant, and every step below bears it: the garbage collector may end a stream that
        # nobody holds at any allocation, in this thread too, which cancels.
        self._lock = threading.RLock()
        self._inboxes: dict[int, _Inbox] = {}
        self._error: TriptychError | None = None
        self._rpc = stub.Session(iter(self._outgoing.get, None), metadata=metadata)
        self._reader = threading.Thread(target=self._read, name="triptych-session", daemon=True)
        self._reader.start()

    @property
    def broken(self) -> bool:
        """Whether it takes no more requests."""
        return self._error is not None

    def start(self, inbox: _Inbox, message: inference_pb2.SessionRequest) -> None:
        """Send a request; what comes for it, a failure too, goes into its inbox."""
        with self._lock:
            if self._error is not None:
                inbox.items.put(self._error)
                return
            self._inboxes[inbox.call_id] = inbox
            self._outgoing.put(message)

    def cancel(self, call_id: int) -> None:
        """End a request; no more comes for it."""
        with self._lock:
            if self._inboxes.pop(call_id, None) is not None:
                self._outgoing.put(cancel_of(call_id))

    def close(self) -> None:
        """End all."""
        self._rpc.cancel()
        self._reader.join(_CLOSING_SECONDS)

    def _read(self) -> None:
        error: TriptychError = cut_off()
        try:
            for response in self._rpc:
                for event in response.events:
                    self._deliver(event)
        except grpc.RpcError as failure:
            error = from_rpc_error(failure)
        with self._lock:
            self._error = error
            for inbox in list(self._inboxes.values()):
                inbox.items.put(error)
            self._inboxes.clear()
            self._outgoing.put(None)  # lets go of gRPC's own thread

    def _deliver(self, event: inference_pb2.SessionEvent) -> None:
        with self._lock:
            inbox = self._inboxes.get(event.id)
            if inbox is None:  # cancelled, and this was on its way
                return
            if is_last(event):
                self._inboxes.pop(event.id, None)
            inbox.items.put(event)
            if inbox.items.qsize() <= MAX_UNREAD or self._inboxes.pop(event.id, None) is None:
                return
            inbox.items.put(too_slow())
            self._outgoing.put(cancel_of(event.id))


class _SessionCall(Generic[ResponseT]):
    """One attempt of a request in a session."""

    def __init__(
        self, wire: _Wire, call_id: int, reading: Reading[ResponseT], seconds: float | None
    ) -> None:
        self.call_id = call_id
        self.items: queue.SimpleQueue[inference_pb2.SessionEvent | TriptychError] = (
            queue.SimpleQueue()
        )
        self._wire = wire
        self._reading = reading
        self._deadline = deadline_of(seconds)

    def __next__(self) -> ResponseT:
        try:
            item = self.items.get(timeout=remaining(self._deadline))
        except queue.Empty:
            self._wire.cancel(self.call_id)
            raise deadline_exceeded() from None
        if isinstance(item, TriptychError):
            raise item
        return self._reading(item)

    def cancel(self) -> None:
        """End the request, by its id."""
        self._wire.cancel(self.call_id)
        self.items.put(cancelled())  # for whoever waits in __next__
