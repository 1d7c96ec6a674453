"""uvicorn's HTTP/1.1 protocol with bounds on the head of a request: its size and its time; and
what the protocol itself refuses in OpenAI's shape.

httptools keeps what it has read of a header until the header ends, however long it is.
"""

import asyncio
import re
from typing import Any

from uvicorn._types import ASGIReceiveCallable, ASGISendCallable, Scope
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from triptych.services.tokenizer.openai_http.errors import HttpError

_OFFER = re.compile(rb"\r\nupgrade:[ \t]*h2c[ \t]*(?=\r\n|$)", re.IGNORECASE)
_BUSY_RETRY_MS = 1000
_MAX_PIPELINED = 16
"""Requests of one connection that wait for their turn; one more, and it is closed."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """Answers 431 and closes when request line and headers have more than `max_head_bytes`; what
    came in one read with the end of the request before is not counted."""

    max_head_bytes = 64 << 10
    head_seconds = 30.0

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],  # uvicorn's own type
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._head_bytes = 0
        self._head_tail = b""  # the last bytes of it: its end may come in two reads
        self._in_head = True
        self._head_timer: asyncio.TimerHandle | None = None
        self._cycles: list[RequestResponseCycle] = []
        # uvicorn's own answer at the bound is plain text that says nothing of when to try again.
        self._most_connections, self.limit_concurrency = self.limit_concurrency, None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the first head."""
        super().connection_made(transport)  # type: ignore[arg-type]  # uvicorn narrows it
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing, and tell every request of it: uvicorn tells the last that came."""
        self._stop_waiting()
        super().connection_lost(exc)
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._cycles.clear()

    def data_received(self, data: bytes) -> None:
        """Feed the parser, unless the head has become too long."""
        if self._in_head:
            self._head_bytes += self._head_part(data)
            if self._head_bytes > self.max_head_bytes:
                self._refuse_head()
                return
            if b"h2c" in data:
                data = _without_h2c(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        """A head has begun."""
        self._wait_for_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head is over."""
        self._in_head = False
        self._head_bytes, self._head_tail = 0, b""
        self._stop_waiting()
        served = self.app
        if self._most_connections is not None and self._over(self._most_connections):
            self.app = _busy
        try:
            super().on_headers_complete()
        finally:
            self.app = served
        self._cycles = [each for each in self._cycles if not each.response_complete]
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None:
            self._cycles.append(cycle)
        if len(self._cycles) > _MAX_PIPELINED:
            self.transport.close()
        elif self.pipeline:
            self.flow.resume_reading()  # or nobody would see the client hang up

    def on_message_complete(self) -> None:
        """What follows is the next head."""
        self._in_head = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Of what is no HTTP."""
        self._refuse(b"400 Bad Request", HttpError(400, msg, code="invalid_http"))

    def _head_part(self, data: bytes) -> int:
        """Bytes of what was received that belong to the head."""
        seen = self._head_tail + data
        end = seen.find(b"\r\n\r\n")
        before = len(self._head_tail)
        self._head_tail = seen[-3:]
        return len(data) if end < 0 else max(0, end + 4 - before)

    def _over(self, most: int) -> bool:
        return len(self.connections) >= most or len(self.tasks) >= most

    def _wait_for_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_seconds, self._too_slow)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        self._head_timer = None
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete:
            self._wait_for_head()  # the next request's, while this one is being answered
        elif not self.transport.is_closing():
            self.transport.close()

    def _refuse_head(self) -> None:
        error = HttpError(
            431, f"request line and headers have more than {self.max_head_bytes} bytes",
            code="headers_too_large",
        )  # fmt: skip
        self._refuse(b"431 Request Header Fields Too Large", error)

    def _refuse(self, status: bytes, error: HttpError) -> None:
        """Answer and close, past what may be running on this connection."""
        body = error.body()
        if not self.transport.is_closing():
            self.transport.write(
                b"HTTP/1.1 %s\r\n"
                b"content-type: application/json\r\nconnection: close\r\n"
                b"content-length: %d\r\n\r\n%s" % (status, len(body), body)
            )
            self.transport.close()


def _without_h2c(data: bytes) -> bytes:
    """Java's client offers HTTP/2 with its first request; httptools then leaves out the body."""
    head, end, rest = data.partition(b"\r\n\r\n")
    return _OFFER.sub(b"", head) + end + rest


async def _busy(_scope: Scope, _receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
    error = HttpError(
        503, "too many connections are open", "service_unavailable_error", code="unavailable",
        retry_after_ms=_BUSY_RETRY_MS,
    )  # fmt: skip
    body = error.body()
    headers = {
        "content-type": "application/json", "content-length": str(len(body)),
        "connection": "close", **error.headers(),
    }  # fmt: skip
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 503, "headers": pairs, "trailers": False})
    await send({"type": "http.response.body", "body": body, "more_body": False})
