"""Many requests on one stream: asyncio."""

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Protocol, Self

import grpc

from triptych.client.asynchronous_stream import AsyncStream
from triptych.client.attempts import Attempts, RequestT, deadline_of, remaining
from triptych.client.errors import (
    TriptychError,
    cancelled,
    cut_off,
    deadline_exceeded,
    from_rpc_error,
)
from triptych.client.options import ClientOptions
from triptych.client.pauses import AsyncPause
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
from triptych.v1 import common_pb2, inference_pb2

if TYPE_CHECKING:
    from triptych.v1.inference_pb2_grpc import InferenceServiceAsyncStub


class AsyncSession:
    """Requests that share one stream: the cheap form for many of them, of one event loop.

    Made by `AsyncClient.session`. Use it as a context: leaving it cancels what still runs. When its
    stream breaks, its requests go on over a new one, as those of the client do.
    """

    def __init__(
        self, stub: "InferenceServiceAsyncStub", options: ClientOptions, pause: AsyncPause
    ) -> None:
        self._stub = stub
        self._options = options
        self._pause = pause
        self._wire: _Wire | None = None
        self._closed = False
        self._last_id = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what runs and end the stream."""
        self._closed = True
        if self._wire is not None:
            await self._wire.close()

    def generate(
        self,
        prompt: Prompt,
        params: common_pb2.SamplingParams | None = None,
        *,
        model: str = "",
        timeout: float | None = None,
    ) -> AsyncStream[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]:
        """As `AsyncClient.generate`."""
        return self._stream(generate_request(prompt, params, model), output_of, timeout)

    def chat(
        self,
        messages: Messages,
        params: common_pb2.SamplingParams | None = None,
        *,
        model: str = "",
        timeout: float | None = None,
    ) -> AsyncStream[inference_pb2.ChatRequest, inference_pb2.ChatResponse]:
        """As `AsyncClient.chat`."""
        return self._stream(chat_request(messages, params, model), chat_of, timeout)

    def _stream(
        self, request: RequestT, reading: Reading[ResponseT], timeout: float | None
    ) -> AsyncStream[RequestT, ResponseT]:
        attempts: Attempts[RequestT, ResponseT] = Attempts(request, self._options, timeout)

        def opening(request: RequestT, seconds: float | None) -> _SessionCall[ResponseT]:
            if self._closed:
                raise cancelled()
            if self._wire is None or self._wire.broken:
                self._wire = _Wire(self._stub, self._options.metadata)
            self._last_id += 1
            call = _SessionCall(self._wire, self._last_id, reading, seconds)
            self._wire.start(call, start_of(self._last_id, request, seconds))
            return call

        return AsyncStream(opening, attempts, self._pause)


class _Inbox(Protocol):
    """Where a wire puts what came for one request."""

    call_id: int
    items: "asyncio.Queue[inference_pb2.SessionEvent | TriptychError]"


class _Wire:
    """One Session RPC. A task reads it and puts each event where its request waits."""

    def __init__(
        self, stub: "InferenceServiceAsyncStub", metadata: tuple[tuple[str, str], ...]
    ) -> None:
        self._outgoing: asyncio.Queue[inference_pb2.SessionRequest | None] = asyncio.Queue()
        self._inboxes: dict[int, _Inbox] = {}
        self._error: TriptychError | None = None
        self._rpc = stub.Session(self._requests(), metadata=metadata)
        self._reader = asyncio.create_task(self._read(), name="triptych-session")

    @property
    def broken(self) -> bool:
        """Whether it takes no more requests."""
        return self._error is not None

    def start(self, inbox: _Inbox, message: inference_pb2.SessionRequest) -> None:
        """Send a request; what comes for it, a failure too, goes into its inbox."""
        if self._error is not None:
            inbox.items.put_nowait(self._error)
            return
        self._inboxes[inbox.call_id] = inbox
        self._outgoing.put_nowait(message)

    def cancel(self, call_id: int) -> None:
        """End a request; no more comes for it."""
        if self._inboxes.pop(call_id, None) is not None:
            self._outgoing.put_nowait(cancel_of(call_id))

    async def close(self) -> None:
        """End all."""
        self._rpc.cancel()
        await asyncio.wait((self._reader,))

    async def _requests(self) -> AsyncIterator[inference_pb2.SessionRequest]:
        while (message := await self._outgoing.get()) is not None:
            yield message

    async def _read(self) -> None:
        error: TriptychError = cut_off()
        try:
            async for response in self._rpc:
                for event in response.events:
                    self._deliver(event)
        except grpc.RpcError as failure:
            error = from_rpc_error(failure)
        except asyncio.CancelledError:  # what gRPC raises for a call that `close` cancelled
            error = cancelled()
        self._error = error
        for inbox in self._inboxes.values():
            inbox.items.put_nowait(error)
        self._inboxes.clear()
        self._outgoing.put_nowait(None)

    def _deliver(self, event: inference_pb2.SessionEvent) -> None:
        inbox = self._inboxes.get(event.id)
        if inbox is None:  # cancelled, and this was on its way
            return
        inbox.items.put_nowait(event)
        if is_last(event):
            del self._inboxes[event.id]
        elif inbox.items.qsize() > MAX_UNREAD:
            inbox.items.put_nowait(too_slow())
            self.cancel(event.id)


class _SessionCall(Generic[ResponseT]):
    """One attempt of a request in a session."""

    def __init__(
        self, wire: _Wire, call_id: int, reading: Reading[ResponseT], seconds: float | None
    ) -> None:
        self.call_id = call_id
        self.items: asyncio.Queue[inference_pb2.SessionEvent | TriptychError] = asyncio.Queue()
        self._wire = wire
        self._reading = reading
        self._deadline = deadline_of(seconds)

    async def __anext__(self) -> ResponseT:
        try:
            async with asyncio.timeout(remaining(self._deadline)):
                item = await self.items.get()
        except TimeoutError:
            self._wire.cancel(self.call_id)
            raise deadline_exceeded() from None
        if isinstance(item, TriptychError):
            raise item
        return self._reading(item)

    def cancel(self) -> None:
        """End the request, by its id."""
        self._wire.cancel(self.call_id)
        self.items.put_nowait(cancelled())  # for whoever waits in __anext__
