"""Between two attempts: a back-off that is over when the connection is there again.

Back-offs grow with an outage while a channel's own pace (`ClientOptions.arguments`) stays quick, so
that whoever sat them out would be late by as much as the engine was away.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine

import grpc

_POLL = 0.05
"""Seconds within which a cancel, or (asyncio) the connection, is noticed."""
_SHORT = 0.2
"""Waits up to so many seconds are sat out."""
_BEGINS = 1.0

Pause = Callable[[float, float | None, threading.Event], None]
"""Waits: seconds, what the engine asked for of them, and an event that ends it."""
AsyncPause = Callable[[float, float | None, asyncio.Event], Coroutine[None, None, None]]
"""Waits: seconds, what the engine asked for of them, and an event that ends it."""


class _Watch:
    """Sees a connection come back."""

    def __init__(self) -> None:
        self._was_down = False
        self.begun = threading.Event()
        self.back = threading.Event()

    def follow(self, state: grpc.ChannelConnectivity) -> None:
        """Told of every state."""
        if state is not grpc.ChannelConnectivity.READY:
            self._was_down = True
        elif self._was_down:
            self.back.set()
        self.begun.set()


def pause(
    channel: grpc.Channel, seconds: float, asked: float | None, cancelled: threading.Event
) -> None:
    """A `Pause`. What the engine itself asked for is waited for to the end."""
    if asked is not None or seconds <= _SHORT or cancelled.is_set():
        cancelled.wait(seconds)
        return
    end = time.monotonic() + seconds
    watch = _Watch()
    channel.subscribe(watch.follow, try_to_connect=True)
    try:
        while (left := end - time.monotonic()) > 0 and not cancelled.is_set():
            if watch.back.wait(min(left, _POLL)):
                return
    finally:
        # The channel may be closed next, which gRPC's thread does not bear before its first look.
        watch.begun.wait(_BEGINS)
        channel.unsubscribe(watch.follow)


async def async_pause(
    channel: grpc.aio.Channel, seconds: float, asked: float | None, cancelled: asyncio.Event
) -> None:
    """An `AsyncPause`. What the engine itself asked for is waited for to the end."""
    end = time.monotonic() + seconds
    watch = _Watch()
    while (left := end - time.monotonic()) > 0 and not cancelled.is_set():
        if asked is None:
            watch.follow(channel.get_state(try_to_connect=True))
            if watch.back.is_set():
                return
        try:
            async with asyncio.timeout(min(left, _POLL) if asked is None else left):
                await cancelled.wait()
        except TimeoutError:
            pass
