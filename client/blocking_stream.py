"""A stream of responses that goes on over failures: blocking."""

import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

import grpc

from triptych.client.answer import Answer, joined
from triptych.client.attempts import Attempts, RequestT, remaining
from triptych.client.errors import (
    ResumeMismatch,
    TriptychError,
    cancelled,
    cut_off,
    from_rpc_error,
)
from triptych.client.pauses import Pause
from triptych.client.received import ResponseT

_Response_co = TypeVar("_Response_co", covariant=True)


class Call(Protocol[_Response_co]):
    """One attempt. Reading raises TriptychError."""

    def __next__(self) -> _Response_co: ...

    def cancel(self) -> object:
        """End it from any thread; the engine frees what it held."""
        ...


Opening = Callable[[RequestT, float | None], Call[ResponseT]]
"""Begins an attempt, without waiting: the request, and the seconds that it may take."""


class _Rpc(Protocol[_Response_co]):
    def __next__(self) -> _Response_co: ...

    def cancel(self) -> bool: ...


class RpcCall(Generic[_Response_co]):
    """An attempt that is an RPC of its own."""

    def __init__(self, rpc: _Rpc[_Response_co]) -> None:
        self._rpc = rpc

    def __next__(self) -> _Response_co:
        try:
            return next(self._rpc)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    def cancel(self) -> None:
        """End it."""
        self._rpc.cancel()


class Stream(Generic[RequestT, ResponseT]):
    """The pieces of an answer, as they come.

    Iterate over it, once; or let `answer()` join them. It is under way when you get it. Leaving it
    (the end of a `with`, or the last reference) cancels what still runs.

    Iterating raises TriptychError: those of its module, after the retries of the options. After
    ResumeMismatch nothing more is read.
    """

    def __init__(
        self,
        opening: Opening[RequestT, ResponseT],
        attempts: Attempts[RequestT, ResponseT],
        pause: Pause,
    ) -> None:
        self._cancelled = threading.Event()
        self._opening = opening
        self._pause = pause
        self._attempts = attempts
        self._call = self._opened()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        if hasattr(self, "_call"):  # the first attempt could be opened
            self._call.cancel()

    def __iter__(self) -> Iterator[ResponseT]:
        return self

    def __next__(self) -> ResponseT:
        while not self._attempts.complete:
            if self._cancelled.is_set():
                raise cancelled()
            try:
                response = self._next_response()
            except TriptychError as error:
                self._try_again(error)
                continue
            try:
                new = self._attempts.take(response)
            except ResumeMismatch:
                self._call.cancel()
                raise
            if new is not None:
                return new
        raise StopIteration

    def cancel(self) -> None:
        """End the request, from any thread; a reader gets Cancelled. Nothing after its end."""
        self._cancelled.set()
        self._call.cancel()

    def answer(self) -> Answer:
        """Read to the end: the pieces that are still to come, joined."""
        with self:
            return joined(self)

    def _next_response(self) -> ResponseT:
        try:
            return next(self._call)
        except StopIteration:
            raise cut_off() from None

    def _try_again(self, error: TriptychError) -> None:
        if self._cancelled.is_set():
            raise cancelled() from error
        self._pause(self._attempts.wait_after(error), error.retry_after, self._cancelled)
        if self._cancelled.is_set():
            raise cancelled() from error
        self._call = self._opened()
        if self._cancelled.is_set():  # in between, by another thread
            self._call.cancel()

    def _opened(self) -> Call[ResponseT]:
        return self._opening(self._attempts.request(), remaining(self._attempts.deadline))
