"""Between two attempts: a back-off that is over when the connection is there again.

Back-offs grow with an outage while a channel's own pace (`ClientOptions.arguments`) stays quick, so
that whoever sat them out would be late by as much as the engine was away.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Protocol

import grpc

from triptych.client.errors import from_rpc_error

_POLL = 0.05
"""Seconds within which a cancel, or the connection, is noticed."""
_SHORT = 0.2
"""Waits up to so many seconds are sat out."""
_UNANSWERED = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)

Pause = Callable[[float, float | None, threading.Event], None]
"""Waits: seconds, what the engine asked for of them, and an event that ends it."""
AsyncPause = Callable[[float, float | None, asyncio.Event], Coroutine[None, None, None]]
"""Waits: seconds, what the engine asked for of them, and an event that ends it."""


class ProbeCall(Protocol):
    """A probe under way: gRPC's future."""

    def done(self) -> bool:
        """Whether it has ended."""
        ...

    def cancel(self) -> object:
        """End it, unless it has."""
        ...

    def cancelled(self) -> bool:
        """Whether it was ended here."""
        ...

    def exception(self) -> Exception | None:
        """What it ended with; None: an answer."""
        ...


Probe = Callable[[float, bool], ProbeCall]
"""Begins a call that costs nothing: seconds, and whether it waits for a connection."""


def pause(probe: Probe, seconds: float, asked: float | None, cancelled: threading.Event) -> None:
    """A `Pause`. What the engine itself asked for is waited for to the end.

    By probes: a blocking channel tells its state through a thread of gRPC's only, which fails when
    the channel is closed.
    """
    end = time.monotonic() + seconds
    # Who is answered at first has not lost the connection: the back-off is for something else.
    if (
        asked is None
        and seconds > _SHORT
        and not _is_answered(probe(seconds, False), cancelled)
        and (left := end - time.monotonic()) > 0
        and _is_answered(probe(left, True), cancelled)
    ):
        return
    cancelled.wait(max(0.0, end - time.monotonic()))


def _is_answered(call: ProbeCall, cancelled: threading.Event) -> bool:
    """Whether the engine says anything."""
    while not call.done() and not cancelled.wait(_POLL):
        pass
    call.cancel()
    if call.cancelled():
        return False
    error = call.exception()
    if not isinstance(error, grpc.RpcError):
        return True
    failure = from_rpc_error(error)
    return failure.code not in _UNANSWERED or failure.retry_after is not None


async def async_pause(
    channel: grpc.aio.Channel, seconds: float, asked: float | None, cancelled: asyncio.Event
) -> None:
    """An `AsyncPause`. What the engine itself asked for is waited for to the end."""
    end = time.monotonic() + seconds
    was_down = False
    while (left := end - time.monotonic()) > 0 and not cancelled.is_set():
        if asked is None:
            ready = channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY
            if was_down and ready:
                return
            was_down = was_down or not ready
        try:
            async with asyncio.timeout(min(left, _POLL) if asked is None else left):
                await cancelled.wait()
        except TimeoutError:
            pass
