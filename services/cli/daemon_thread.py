"""Work that may take long and cannot be cancelled, off the event loop."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

_T = TypeVar("_T")


async def in_daemon_thread(work: Callable[[], _T]) -> _T:
    """What `work` returns or raises. Unlike asyncio.to_thread nobody waits for it at the end of the
    process: a download of hours does not hold up a stop."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def settle(end: Callable[[], None]) -> None:
        if not done.done():
            end()

    def run() -> None:
        try:
            end = partial(done.set_result, work())
        except Exception as error:  # the top of the thread: it goes on where it is awaited
            end = partial(done.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, end)

    threading.Thread(target=run, name="work", daemon=True).start()
    return await done
