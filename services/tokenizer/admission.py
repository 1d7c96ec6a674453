"""How many requests are open at once, how large together, and the end of taking new ones."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from triptych.engine_core.errors import QueueFull, Unavailable


class Admission:
    """A request is admitted from before its prompt is read until its last response is sent."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._bytes = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed: str | None = None
        self.running = 0

    @contextmanager
    def admit(self, size: int) -> Iterator[None]:
        """Hold one place, for a message of `size` bytes.

        Raises QueueFull or, once closed, Unavailable; at once.
        """
        if self._closed is not None:
            raise Unavailable(self._closed)
        if self.running >= self._max_requests:
            raise QueueFull(
                f"{self.running} requests are open, the bound is max_streams {self._max_requests}"
            )
        if self._bytes + size > self._max_bytes:
            raise QueueFull(
                f"the open requests hold {self._bytes} bytes and this one has {size},"
                f" the bound is max_prompt_bytes {self._max_bytes}"
            )
        self.running += 1
        self._bytes += size
        self._idle.clear()
        try:
            yield
        finally:
            self.running -= 1
            self._bytes -= size
            if not self.running:
                self._idle.set()

    def close(self, reason: str) -> None:
        """Refuse new requests from now on."""
        self._closed = reason

    def open(self) -> None:
        """Take requests again."""
        self._closed = None

    async def idle(self, grace: float) -> bool:
        """Wait for the open requests to end, at most `grace` seconds; all gone?"""
        try:
            async with asyncio.timeout(grace):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
