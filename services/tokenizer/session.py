"""One Session rpc: many requests on one stream.

A reader takes starts and cancels in their order. Each start is checked in a task of its own, so
that one whose grammar or prompt takes long holds up neither the others nor its own cancel. The
writer sends everything that came in a drain as one response. Each request ends with exactly one
terminal event. What is refused is queued too; while too much is queued or being checked the reader
stops, and gRPC's flow control slows the client.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from google.rpc import status_pb2

from triptych.engine_core.errors import DuplicateId, InvalidRequest, QueueFull, RequestError
from triptych.services.runtime.status import to_status, unexpected
from triptych.services.tokenizer.admission import Admission
from triptych.services.tokenizer.generation import Generation, Running
from triptych.services.tokenizer.stats import Counters
from triptych.v1 import common_pb2, inference_pb2

MAX_SESSION_REQUESTS = 1024
_MAX_QUEUED_ENDS = 256
_MAX_STARTING = 256
_RESPONSE_BYTES = 1 << 20  # clients take 4 MiB by default


@dataclass(frozen=True, slots=True)
class _Entry:
    running: Running
    closing: ExitStack
    is_chat: bool


class Session:
    """The requests of one session. Use once: `run`."""

    def __init__(
        self,
        generation: Generation,
        admission: Admission,
        counters: Counters,
        remaining: Callable[[], float | None] = lambda: None,
    ) -> None:
        """`remaining`: seconds until the session's deadline; None without one."""
        self._remaining = remaining
        self._generation = generation
        self._admission = admission
        self._counters = counters
        self._entries: dict[int, _Entry] = {}
        self._changed: dict[int, None] = {}
        self._starting: dict[int, asyncio.Task[inference_pb2.SessionEvent | None]] = {}
        self._ends: list[inference_pb2.SessionEvent] = []  # of requests that never ran
        self._woken = asyncio.Event()
        self._room = asyncio.Event()

    async def run(
        self,
        requests: AsyncIterator[inference_pb2.SessionRequest],
        write: Callable[[inference_pb2.SessionResponse], Awaitable[None]],
    ) -> None:
        """Serve until the client has half-closed and its requests have ended; or it is gone."""
        reader = asyncio.create_task(self._read(requests))
        reader.add_done_callback(lambda _: self._woken.set())
        try:
            while self._entries or self._ends or self._starting or not reader.done():
                await self._woken.wait()
                self._woken.clear()
                while response := self._collect():
                    await write(response)
                if reader.done():
                    reader.result()  # raises what ended the reader
        finally:
            tasks = (reader, *self._starting.values())
            for task in tasks:
                task.cancel()
            for entry in self._entries.values():
                entry.closing.close()
            self._entries.clear()
            await asyncio.wait(tasks)
            if not reader.cancelled():
                reader.exception()  # the stream's own end says more

    # ----------------------------------------------------------------------------------- reading

    async def _read(self, requests: AsyncIterator[inference_pb2.SessionRequest]) -> None:
        async for request in requests:
            match request.WhichOneof("action"):
                case "start":
                    self._begin(request.start)
                case "cancel":
                    self._cancel(request.cancel.id)
                case _:
                    raise InvalidRequest("action", "neither start nor cancel is set")
            while len(self._ends) >= _MAX_QUEUED_ENDS or len(self._starting) >= _MAX_STARTING:
                self._room.clear()
                await self._room.wait()

    def _begin(self, start: inference_pb2.SessionStart) -> None:
        if start.id in self._entries or start.id in self._starting:
            error = DuplicateId(f"id: {start.id} belongs to a running request of this session")
            self._end(_error_event(start.id, to_status(error)))
            return
        task = asyncio.create_task(self._start(start))
        self._starting[start.id] = task
        task.add_done_callback(partial(self._started, start))

    def _cancel(self, request_id: int) -> None:
        """An unknown id is no error: the request may just have ended."""
        if (task := self._starting.get(request_id)) is not None and task.cancel():
            return
        if (entry := self._entries.get(request_id)) is not None:
            entry.running.cancel()

    async def _start(self, start: inference_pb2.SessionStart) -> inference_pb2.SessionEvent | None:
        """The request's end, where it has already come to it."""
        try:
            with ExitStack() as stack:
                running = await self._admitted(start, stack)
                self._entries[start.id] = _Entry(running, stack.pop_all(), start.HasField("chat"))
        except RequestError as error:
            return _error_event(start.id, to_status(error))
        except Exception as error:  # the top of this request; the others go on
            return _error_event(start.id, unexpected(error))
        return None

    def _started(
        self,
        start: inference_pb2.SessionStart,
        task: "asyncio.Task[inference_pb2.SessionEvent | None]",
    ) -> None:
        del self._starting[start.id]
        self._room.set()
        if task.cancelled():
            self._end(_cancelled_event(start))
        elif (end := task.result()) is not None:
            self._end(end)

    async def _admitted(self, start: inference_pb2.SessionStart, stack: ExitStack) -> Running:
        if len(self._entries) + len(self._starting) > MAX_SESSION_REQUESTS:
            raise QueueFull(
                f"{len(self._entries)} requests run in this session,"
                f" at most {MAX_SESSION_REQUESTS} may"
            )
        stack.enter_context(self._admission.admit(start.ByteSize()))
        match start.WhichOneof("request"):
            case "generate":
                valid = await self._generation.generate(start.generate)
            case "chat":
                valid = await self._generation.chat(start.chat)
            case _:
                raise InvalidRequest("start.request", "neither generate nor chat is set")
        running = self._generation.start(valid, partial(self._wake, start.id), self._remaining())
        return stack.enter_context(running)

    def _wake(self, request_id: int) -> None:
        self._changed[request_id] = None
        self._woken.set()

    # ----------------------------------------------------------------------------------- writing

    def _collect(self) -> inference_pb2.SessionResponse | None:
        """Everything that happened, up to a size; None when nothing did."""
        response = inference_pb2.SessionResponse()
        size = 0
        if self._ends:
            response.events.extend(self._ends)
            self._ends.clear()
            self._room.set()
        while self._changed and size < _RESPONSE_BYTES:
            request_id = next(iter(self._changed))
            del self._changed[request_id]
            if added := self._add_event(request_id, response):
                size += added
                entry = self._entries.get(request_id)
                if entry is not None and entry.running.stream.has_more:
                    self._changed[request_id] = None  # of another choice
        if not response.events:
            return None
        self._counters.responses_total += 1
        return response

    def _add_event(self, request_id: int, response: inference_pb2.SessionResponse) -> int:
        """About how many bytes it is; 0 when nothing happened."""
        entry = self._entries.get(request_id)
        if entry is None:
            return 0
        running = entry.running
        try:
            piece = running.stream.take()
        except RequestError as error:
            self._close(request_id)
            response.events.append(_error_event(request_id, to_status(error)))
            return response.events[-1].ByteSize()
        if piece is None:
            return 0
        self._counters.tokens_total += piece.new_tokens
        if piece.usage is not None:
            self._close(request_id)
        event = response.events.add(id=request_id)
        target = event.chat if entry.is_chat else event.output
        target.SetInParent()  # of a piece of which nothing is wanted too
        running.fill(target, piece)
        if piece.logprobs or piece.prompt_logprobs or entry.is_chat:
            return event.ByteSize()  # which costs as much as making it
        return 64 + 4 * len(piece.text) + 5 * len(piece.token_ids)

    def _close(self, request_id: int) -> None:
        self._entries.pop(request_id).closing.close()

    def _end(self, event: inference_pb2.SessionEvent) -> None:
        self._ends.append(event)
        self._woken.set()


def _error_event(request_id: int, status: status_pb2.Status) -> inference_pb2.SessionEvent:
    return inference_pb2.SessionEvent(
        id=request_id,
        error=inference_pb2.SessionError(
            code=status.code, message=status.message, status=status.SerializeToString()
        ),
    )


def _cancelled_event(start: inference_pb2.SessionStart) -> inference_pb2.SessionEvent:
    """Of a request that had not been submitted: one end, with no choice begun."""
    event = inference_pb2.SessionEvent(id=start.id)
    target = event.chat if start.HasField("chat") else event.output
    target.finish_reason = common_pb2.FINISH_REASON_ABORT
    target.usage.SetInParent()
    return event
