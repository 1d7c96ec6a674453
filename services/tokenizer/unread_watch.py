"""Ends rpcs whose client lives and does not read. A write of theirs waits for flow control: for
ever, since HTTP/2 knows of no time, and neither pings nor the kernel miss anybody.

The work of such an rpc has ended before, at max_unread_tokens; this gives its place back. What gRPC
holds of it, and the status, wait for the client as long as its connection lasts.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from triptych.engine_core.errors import SlowReader

MessageT = TypeVar("MessageT")
Write = Callable[[MessageT], Awaitable[None]]


class _Looked(Protocol):
    def look(self) -> None: ...


class _Call(Generic[MessageT]):
    def __init__(self, task: "asyncio.Task[object]", write: Write[MessageT]) -> None:
        self._task = task
        self._write = write
        self._waiting = False
        self._writes = 0
        self._seen = -1
        self._looks = 0
        self.given_up = False

    async def write(self, message: MessageT) -> None:
        self._writes += 1
        self._waiting = True
        await self._write(message)
        self._waiting = False

    def look(self) -> None:
        self._looks = self._looks + 1 if self._waiting and self._seen == self._writes else 0
        self._seen = self._writes
        if self._looks == 2:
            self.given_up = True
            self._task.cancel()


class UnreadWatch:
    """Of one server. Event loop only."""

    def __init__(self, timeout: float) -> None:
        """`timeout`: seconds for which a client may take nothing; 0: for ever."""
        self._timeout = timeout
        # A write that waits at three looks in a row has no reader. Not at two: the second may come
        # right after this process itself was stopped for a while.
        self._interval = timeout / 2
        self._calls: set[_Looked] = set()
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def watching(self, write: Write[MessageT]) -> Iterator[Write[MessageT]]:
        """Around all that the running task writes; gives the function to write with.

        Raises SlowReader where the client takes nothing for the timeout, or for half as long again.
        """
        task = asyncio.current_task()
        assert task is not None, "rpcs run in tasks"
        call = _Call(task, write)
        self._calls.add(call)
        self._wait()
        try:
            yield call.write
        except asyncio.CancelledError:
            if not call.given_up:
                raise
            task.uncancel()
            raise SlowReader(f"nothing was read for {self._timeout:g} s or more") from None
        finally:
            self._calls.discard(call)

    def _wait(self) -> None:
        if self._timer is None and self._timeout > 0:
            self._timer = asyncio.get_running_loop().call_later(self._interval, self._look)

    def _look(self) -> None:
        self._timer = None
        for call in self._calls:
            call.look()
        if self._calls:
            self._wait()
