"""What an operator sees while the processes start: a live line on a terminal, else log lines."""

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TextIO

import psutil

from triptych.services.cli.panel import size

_log = logging.getLogger(__name__)
_REDRAW = 0.2  # seconds
_ASK_AFTER = 0.8  # seconds: a start that only maps its weights is over by then
_BAR = 20  # columns
_CLEAR_LINE = "\r\x1b[2K"

Load = Callable[[], Awaitable[tuple[int, int] | None]]
"""Asks how many bytes of weights are loaded, and of how many; None while none are."""


class StartupProgress:
    """Follows the processes until each has been noted as ready. Event loop only."""

    def __init__(self, names: Sequence[str], out: TextIO, load: Load) -> None:
        self._names = tuple(names)
        self._out = out
        self._load = load
        self._load_begin: tuple[float, int] | None = None  # when it was seen first, and its bytes
        self._live = out.isatty()
        self._ready: set[str] = set()
        self._begin = time.monotonic()
        self._ticker: asyncio.Task[None] | None = None

    def start(self, pids: Callable[[], Mapping[str, int]]) -> None:
        """Begin to redraw, if `out` is a terminal."""
        if self._live:
            self._ticker = asyncio.get_running_loop().create_task(self._tick(pids))

    def note(self, name: str, event: str) -> None:
        """A process is "ready", or is being stopped ("stopping")."""
        if event == "ready":
            self._ready.add(name)
        if not self._live:
            _log.info("%s %s", name, event, extra={"s": time.monotonic() - self._begin})

    def finish(self) -> None:
        """Remove the live line; safe to call twice."""
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
            self._out.write(_CLEAR_LINE)
            self._out.flush()

    async def _tick(self, pids: Callable[[], Mapping[str, int]]) -> None:
        while True:
            seconds = time.monotonic() - self._begin
            loaded = await self._load() if seconds > _ASK_AFTER else None
            if loaded is None:
                states = ", ".join(self._state(name, pids().get(name)) for name in self._names)
                line = f"starting, {seconds:.0f} s: {states}"
            else:
                line = self._load_line(*loaded)
            # The cursor goes back to the line's start, so that a child's log line overwrites it.
            line = line[: shutil.get_terminal_size().columns - 1]
            self._out.write(f"{_CLEAR_LINE}{line}\r")
            self._out.flush()
            await asyncio.sleep(_REDRAW)

    def _load_line(self, done: int, total: int) -> str:
        now = time.monotonic()
        if self._load_begin is None or done < self._load_begin[1]:  # or begun anew
            self._load_begin = (now, done)
        begin, before = self._load_begin
        return load_line(done, total, (done - before) / max(now - begin, 1e-9))

    def _state(self, name: str, pid: int | None) -> str:
        if name in self._ready:
            return f"{name} ready"
        if pid is None:
            return f"{name} -"
        try:
            return f"{name} {size(psutil.Process(pid).memory_info().rss)}"
        except psutil.NoSuchProcess:
            return f"{name} -"


def load_line(done: int, total: int, rate: float) -> str:
    """A bar for weights: bytes `done` of `total`, at `rate` bytes per second (0: not known)."""
    share = min(done / total, 1.0)
    full = int(share * _BAR)
    line = f"loading weights [{'#' * full}{'-' * (_BAR - full)}] {share:.0%} of {size(total)}"
    if rate <= 0:
        return line
    left = max(total - done, 0) / rate
    return f"{line}, {size(int(rate))}/s, {left:.0f} s left"
