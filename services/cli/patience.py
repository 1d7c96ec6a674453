"""How long the supervisor waits for what, and for a process that starts."""

import asyncio
from dataclasses import dataclass, field

from triptych.services.cli.cancellation import cancel
from triptych.services.cli.contact import Contact, until_silent
from triptych.services.cli.restart_policy import RestartRules

_MORE_PATIENCE = 3
"""One that starts may be silent for so many times as long as one that is ready: it imports,
and loads."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the supervisor's patience, in seconds."""

    startup_timeout: float = 600.0
    grace: float = 30.0  # the first child to stop, which drains
    grace_rest: float = 10.0  # the others, and a child that is renewed
    probe_interval: float = 0.1
    heartbeat_interval: float = 1.0
    heartbeat_timeout: float = 10.0
    restarts: RestartRules = field(default_factory=RestartRules)
    exit_on_crash_loop: bool = False


async def start_failing(contact: Contact, limits: Limits) -> str | None:
    """Wait until a process is ready: None; or why it must be ended."""
    patience = _MORE_PATIENCE * limits.heartbeat_timeout
    ready = asyncio.ensure_future(_until_ready(contact, limits.probe_interval))
    silent = asyncio.ensure_future(until_silent(contact, limits.heartbeat_interval, patience))
    try:
        await asyncio.wait(
            {ready, silent},
            timeout=limits.startup_timeout,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if ready.done():
            return None
        if silent.done():
            return f"gave no answer for {patience:g} s"
        return f"was not ready after {limits.startup_timeout:g} s"
    finally:
        await cancel(ready, silent)


async def _until_ready(contact: Contact, interval: float) -> None:
    while not await contact.ready():
        await asyncio.sleep(interval)
