"""Starts the processes of an engine, keeps them running, and stops them in order.

It knows nothing of what they do: `probe` says whether one is ready. A child that ends during
start-up ends the engine with the child's exit code; one that ends later is started again, with a
growing delay, until it has ended `max_restarts` times within `restart_window`.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from triptych.services.cli.child import Child, ChildExit, ChildSpec
from triptych.services.runtime.lifecycle import EXIT_FAILED, EXIT_OK, StartupError

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
Probe = Callable[[str], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the supervisor's patience, in seconds unless the name says otherwise."""

    startup_timeout: float = 600.0
    grace: float = 30.0
    grace_rest: float = 5.0  # each child but the first to stop, which drains
    probe_interval: float = 0.1
    restart_delay: float = 0.2
    restart_delay_max: float = 5.0
    restart_window: float = 60.0
    max_restarts: int = 5


class Supervisor:
    """Runs `specs`, started in the given order and stopped in `stop_order`."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        stop_order: Sequence[str],
        probe: Probe,
        limits: Limits,
        progress: Callable[[str, str], None] = lambda _name, _event: None,
        forked: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """`forked` are pids of those of the specs' processes that run already, by name."""
        self._specs = {spec.name: spec for spec in specs}
        self._stop_order = tuple(stop_order)
        self._probe = probe
        self._limits = limits
        self._progress = progress
        self._forked = dict(forked)
        self._children: dict[str, Child] = {}

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the children that run now."""
        return {name: child.pid for name, child in self._children.items() if child.running}

    def replace_spec(self, spec: ChildSpec) -> None:
        """Use another command when the child of that name is started again."""
        self._specs[spec.name] = spec

    async def run(
        self, stop: asyncio.Event, on_ready: Callable[[], Awaitable[None]] | None = None
    ) -> int:
        """Supervise until `stop` is set or a child cannot be kept running; the exit code.

        `on_ready` is awaited once all children are ready, while they are already watched; what it
        raises ends the engine and comes out here. Raises StartupError when start-up takes too long.
        """
        try:
            for name in self._specs:
                self._start(name)
            code = await self._until_stopped(self._ready(), stop)
            if code is None and not stop.is_set():
                after = on_ready() if on_ready is not None else _nothing()
                code = await self._until_stopped(self._serve(after), stop)
            return EXIT_OK if code is None else code
        finally:
            await self._stop_all()

    async def _until_stopped(self, work: Awaitable[int | None], stop: asyncio.Event) -> int | None:
        working = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            await _cancel(stopping)
            return working.result()
        await _cancel(working)
        return None

    async def _ready(self) -> int | None:
        """Wait for every child; its exit code when one ends first."""
        waits = [asyncio.ensure_future(self._child_ready(name)) for name in self._specs]
        try:
            async with asyncio.timeout(self._limits.startup_timeout):
                for wait in asyncio.as_completed(waits):
                    ended = await wait
                    if ended is not None:
                        # The child has said why in a line of its own, unless it was killed.
                        if ended.code <= 0:
                            _log.error("%s during start-up", ended)
                        return ended.code if ended.code > 0 else EXIT_FAILED
        except TimeoutError:
            late = [n for n, w in zip(self._specs, waits, strict=True) if not w.done()]
            raise StartupError(
                f"{', '.join(late)} not ready after {self._limits.startup_timeout:g} s; "
                "see --startup-timeout"
            ) from None
        finally:
            for each in waits:
                await _cancel(each)
        return None

    async def _child_ready(self, name: str) -> ChildExit | None:
        child = self._children[name]
        exited = asyncio.ensure_future(child.exited())
        try:
            while not exited.done():
                if await self._probe(name):
                    self._progress(name, "ready")
                    return None
                await asyncio.wait({exited}, timeout=self._limits.probe_interval)
            return exited.result()
        finally:
            await _cancel(exited)

    async def _serve(self, after: Awaitable[None]) -> int | None:
        """Keep every child running; an exit code when one cannot be kept."""
        keepers: set[asyncio.Future[object]] = {
            asyncio.ensure_future(self._keep(name)) for name in self._specs
        }
        told: asyncio.Future[object] = asyncio.ensure_future(after)
        pending = {*keepers, told}
        try:
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    each.result()
                if done & keepers:
                    return EXIT_FAILED
        finally:
            for each in (*keepers, told):
                await _cancel(each)
        return None

    async def _keep(self, name: str) -> None:
        """Start a child again whenever it ends; return when it ended too often."""
        limits = self._limits
        ends: deque[float] = deque()
        while True:
            ended = await self._children[name].exited()
            now = time.monotonic()
            while ends and now - ends[0] > limits.restart_window:
                ends.popleft()
            ends.append(now)
            facts = {"pid": ended.pid}
            if len(ends) > limits.max_restarts:
                _log.error(
                    "%s, %d times within %g s: giving up",
                    ended, len(ends), limits.restart_window, extra=facts,
                )  # fmt: skip
                return
            delay = min(limits.restart_delay * 2 ** (len(ends) - 1), limits.restart_delay_max)
            _log.error("%s: starting it again in %g s", ended, delay, extra=facts)
            await asyncio.sleep(delay)
            self._start(name)

    def _start(self, name: str) -> None:
        self._children[name] = Child(self._specs[name], self._forked.pop(name, None))

    async def _stop_all(self) -> None:
        grace = self._limits.grace
        for name in self._stop_order:
            child = self._children.get(name)
            if child is None:
                continue
            if child.running:
                self._progress(name, "stopping")
            await child.stop(grace)
            grace = self._limits.grace_rest


async def _nothing() -> None:
    return None


async def _cancel(future: asyncio.Future[_T]) -> None:
    """Cancel and wait; what it raises besides is read elsewhere."""
    future.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.wait({future})
