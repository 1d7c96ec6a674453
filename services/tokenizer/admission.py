"""How many requests are open at once, and the end of taking new ones."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from triptych.engine_core.errors import QueueFull, Unavailable


class Admission:
    """A request is admitted from before its prompt is read until its last response is sent."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self.running = 0

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Hold one place. Raises QueueFull or, once draining, Unavailable; at once."""
        if self._draining:
            raise Unavailable("this process is shutting down")
        if self.running >= self._max_requests:
            raise QueueFull(
                f"{self.running} requests are open, the bound is max_streams {self._max_requests}"
            )
        self.running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.running -= 1
            if not self.running:
                self._idle.set()

    async def drain(self, grace: float) -> bool:
        """Refuse new requests and wait for the open ones, at most `grace` seconds; all gone?"""
        self._draining = True
        try:
            async with asyncio.timeout(grace):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
