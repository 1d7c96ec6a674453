"""How the supervisor hears of a child: whether it is ready, and whether it still answers."""

import asyncio
import time
from typing import Protocol

from triptych.services.cli.cancellation import cancel
from triptych.services.runtime.silence import ListeningClock


class Contact(Protocol):
    """A line to one child, for one of its lives. Calls may be cancelled."""

    async def ready(self) -> bool:
        """Whether it has done its own part of the start, whatever the others do."""
        ...

    async def until_serving(self) -> None:
        """Wait until it does its work, which may take others."""
        ...

    async def answers(self) -> bool:
        """Whether it answers at all; waits for an answer as long as one may come."""
        ...

    async def close(self) -> None:
        """The life is over, or is no longer followed."""
        ...


async def until_silent(contact: Contact, interval: float, timeout: float) -> None:
    """Ask every `interval` seconds; return when no answer has come for `timeout` seconds.

    Time in which this process did not run itself does not count: then nobody is to blame.
    """
    clock = ListeningClock(2 * interval, time.monotonic())
    heard = 0.0
    asking = asyncio.ensure_future(contact.answers())
    try:
        while True:
            await asyncio.sleep(interval)
            now = clock.at(time.monotonic())
            if asking.done():
                heard = now if asking.result() else heard
                asking = asyncio.ensure_future(contact.answers())
            if now - heard >= timeout:
                return
    finally:
        await cancel(asking)
