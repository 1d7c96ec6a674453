"""uvicorn on the process's own event loop: no signal handlers, no logging set-up, our socket."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from triptych.engine_core.errors import Unavailable
from triptych.services.tokenizer.openai_http.app import make_app
from triptych.services.tokenizer.openai_http.bounded_protocol import BoundedHttpProtocol
from triptych.services.tokenizer.openai_http.door import Door

_KEEP_ALIVE = 75  # seconds that an idle connection stays; clients pool theirs
_STOP_GRACE = 1  # seconds for answers that are being written


class _Server(uvicorn.Server):
    """Signals are the process's business."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves `listener` from `start` to `stop`."""

    def __init__(self, door: Door, version: str) -> None:
        self._door = door
        limits = door.limits
        protocol = type(
            "Protocol",
            (BoundedHttpProtocol,),
            {"max_head_bytes": limits.max_head_bytes, "head_seconds": limits.head_seconds},
        )
        self._server = _Server(
            uvicorn.Config(
                make_app(door, version),
                http=protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=limits.max_connections,
                timeout_keep_alive=_KEEP_ALIVE,
                timeout_graceful_shutdown=_STOP_GRACE,
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self, listener: socket.socket) -> None:
        """Accept from now on."""
        self._task = asyncio.create_task(self._server.serve([listener]))
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.001)
        if self._task.done():
            self._task.result()  # raises what kept it from starting

    async def stop(self) -> None:
        """End what still runs, close the listener, give the ends a moment to go out."""
        for answers in tuple(self._door.open):
            answers.fail(Unavailable("this process is shutting down"))
        if self._task is not None:
            self._server.should_exit = True
            await self._task
