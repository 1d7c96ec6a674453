"""What an operator sees while the processes start: a live line on a terminal, else log lines."""

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

import psutil

from triptych.services.cli.panel import size

_log = logging.getLogger(__name__)
_REDRAW = 0.2  # seconds
_CLEAR_LINE = "\r\x1b[2K"


class StartupProgress:
    """Follows the processes until each has been noted as ready. Event loop only."""

    def __init__(self, names: Sequence[str], out: TextIO) -> None:
        self._names = tuple(names)
        self._out = out
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
            states = ", ".join(self._state(name, pids().get(name)) for name in self._names)
            # The cursor goes back to the line's start, so that a child's log line overwrites it.
            line = f"starting, {time.monotonic() - self._begin:.0f} s: {states}"
            line = line[: shutil.get_terminal_size().columns - 1]
            self._out.write(f"{_CLEAR_LINE}{line}\r")
            self._out.flush()
            await asyncio.sleep(_REDRAW)

    def _state(self, name: str, pid: int | None) -> str:
        if name in self._ready:
            return f"{name} ready"
        if pid is None:
            return f"{name} -"
        try:
            return f"{name} {size(psutil.Process(pid).memory_info().rss)}"
        except psutil.NoSuchProcess:
            return f"{name} -"
