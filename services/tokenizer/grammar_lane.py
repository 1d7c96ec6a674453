"""One checker child and the thread that talks to it, in strict turns of message and answer: a
caller that goes leaves both as they were."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import TypeVar

from triptych.engine_core.errors import Unavailable
from triptych.services.tokenizer.grammar_process import CheckLimits, ChildGone, GrammarProcess

T = TypeVar("T")

_log = logging.getLogger(__name__)


class GrammarLane:
    """Its child starts with the first message and is replaced when it exceeds its limits. `run`
    on an event loop; `ask` on the lane's own thread; `close` from anywhere, once."""

    def __init__(self, limits: CheckLimits, name: str) -> None:
        self.limits = limits
        self._child: GrammarProcess | None = None
        self._lock = Lock()
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    @property
    def pid(self) -> int | None:
        """The child that runs now."""
        child = self._child
        return None if child is None else child.pid

    async def run(self, call: Callable[[], T]) -> T:
        """Call it on the lane's thread, when its turn comes."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def ask(self, message: bytes) -> dict[str, str]:
        """The child's answer. Raises ChildGone when there is none, and Unavailable while closing,
        where the child does not start, or where somebody else ended it."""
        try:
            return self._running().ask(message)
        except ChildGone as gone:
            if self._closed:
                raise Unavailable("the tokenizer is stopping") from gone
            self._end_child()
            _log.warning("the grammar checker is replaced: %s", gone)
            if gone.killed:
                raise Unavailable("the process that checks structured output was ended") from gone
            raise

    def interrupt(self) -> None:
        """Let nothing begin any more, and what is in progress fail with Unavailable."""
        with self._lock:
            self._closed = True
            if self._child is not None:
                self._child.kill()

    def close(self) -> None:
        """End the child and the thread."""
        self.interrupt()
        self._thread.shutdown(wait=True)
        if self._child is not None:
            self._child.end()
            self._child = None

    def _running(self) -> GrammarProcess:
        with self._lock:
            if self._closed:
                raise Unavailable("the tokenizer is stopping")
            if self._child is not None and self._child.ended:
                self._child.end()  # somebody else ended it while it was idle
                self._child = None
            if self._child is None:
                self._child = GrammarProcess(self.limits)
        try:
            self._child.wait_until_ready()
        except ChildGone as gone:
            self._end_child()
            raise Unavailable("the process that checks structured output does not start") from gone
        return self._child

    def _end_child(self) -> None:
        with self._lock:
            if self._child is not None:
                self._child.end()
                self._child = None
