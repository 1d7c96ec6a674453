"""Open calls of VllmEngine.Generate by the ids that their clients chose, for Abort."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class _Cancelled(Protocol):
    def cancel(self) -> None: ...


class VllmCall:
    """One. An Abort may come while its prompt is still read: it counts once the request runs."""

    def __init__(self) -> None:
        self._running: _Cancelled | None = None
        self._aborted = False

    def runs(self, running: _Cancelled) -> None:
        """It was submitted."""
        self._running = running
        if self._aborted:
            running.cancel()

    def abort(self) -> None:
        """End it, once."""
        if not self._aborted and self._running is not None:
            self._running.cancel()
        self._aborted = True


class VllmCalls:
    """Of one servicer. Ids need not be unique: all calls of an id are aborted together."""

    def __init__(self) -> None:
        self._calls: dict[str, dict[VllmCall, None]] = {}

    @contextmanager
    def open(self, request_id: str) -> Iterator[VllmCall]:
        """Around a call. Without an id nobody can abort it, another nameless client least."""
        call = VllmCall()
        if not request_id:
            yield call
            return
        siblings = self._calls.setdefault(request_id, {})
        siblings[call] = None
        try:
            yield call
        finally:
            del siblings[call]
            if not siblings:
                del self._calls[request_id]

    def abort(self, request_id: str) -> None:
        """An id that nobody has is no error."""
        for call in self._calls.get(request_id, {}):
            call.abort()
