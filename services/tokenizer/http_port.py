"""The HTTP port: bound when the process starts, served as soon as that costs nobody anything.

The packages behind it take half a second to import. They are imported on a thread once the engine
is ready (or after LATEST seconds, so that health can be asked while a large model loads): the first
token over gRPC does not wait for them. Who connects before that waits in the listener's queue.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from triptych.services.runtime.lifecycle import StartupError

if TYPE_CHECKING:
    from triptych.services.tokenizer.openai_http.door import Door
    from triptych.services.tokenizer.openai_http.serving import HttpServer

LATEST = 2.0
_BACKLOG = 1024

_log = logging.getLogger(__name__)


class HttpPort:
    """One listener and, from some time on, the server behind it. Event loop only."""

    def __init__(
        self,
        make_door: "Callable[[], Door]",
        version: str,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """`make_door` is called once the packages are there; it may import them. `on_failure`: of
        what kept the server from starting."""
        self._make_door = make_door
        self._version = version
        self._on_failure = on_failure
        self._listener: socket.socket | None = None
        self._server: HttpServer | None = None
        self._opening: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self.address = ""
        """host:port as clients reach it; set by `bind`."""

    def bind(self, host: str, port: int, *, shared: bool, unread_timeout: float = 60.0) -> None:
        """Listen. `shared`: other processes may listen on the port too. `unread_timeout`: seconds
        after which a connection is closed whose client takes nothing of what waits for it, or is
        not there any more; whatever state its request is in; 0: never. Raises StartupError."""
        try:
            listener = _listener(host, port, shared=shared, unread_timeout=unread_timeout)
        except OSError as error:
            raise StartupError(
                f"port {port} on {host}: {error.strerror or error};"
                " use another --http-port, or --no-http"
            ) from error
        self._listener = listener
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{shown}:{listener.getsockname()[1]}"

    def open_soon(self) -> None:
        """Serve once `engine_ready` was called, or after LATEST seconds."""
        if self._listener is not None:
            self._opening = asyncio.create_task(self._open(self._listener))
            self._opening.add_done_callback(self._opened)

    def engine_ready(self) -> None:
        """The engine answers now."""
        self._ready.set()

    async def stop(self) -> None:
        """Close listener and connections."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait((self._opening,))
        if self._server is not None:
            await self._server.stop()
        if self._listener is not None:
            self._listener.close()

    async def _open(self, listener: socket.socket) -> None:
        try:
            async with asyncio.timeout(LATEST):
                await self._ready.wait()
        except TimeoutError:
            pass  # a large model; health can be asked meanwhile
        server = await asyncio.to_thread(self._load)
        await server.start(listener)
        self._server = server
        _log.info("listening for HTTP", extra={"address": self.address})

    def _opened(self, opening: "asyncio.Task[None]") -> None:
        if not opening.cancelled() and (error := opening.exception()) is not None:
            self._on_failure(error)

    def _load(self) -> "HttpServer":
        from triptych.services.tokenizer.openai_http.serving import HttpServer

        return HttpServer(self._make_door(), self._version)


def _listener(host: str, port: int, *, shared: bool, unread_timeout: float) -> socket.socket:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        _bound_silence(listener, unread_timeout)
        listener.setblocking(False)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _bound_silence(listener: socket.socket, timeout: float) -> None:
    """Of every connection that it accepts. By the kernel, which alone knows what a peer has taken:
    otherwise a client that lives and does not read keeps its connection for ever, closed or not.
    """
    if not timeout:
        return
    seconds = min(max(1, int(timeout / 3)), 30_000)  # the kernel's own bound is 32,767
    milliseconds = max(1, int(timeout * 1000))  # to the kernel 0 is for ever
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, seconds)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
