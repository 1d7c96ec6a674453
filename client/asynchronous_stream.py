"""A stream of responses that goes on over failures: asyncio."""

import asyncio
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

import grpc

from triptych.client.answer import Answer
from triptych.client.attempts import Attempts, RequestT, remaining
from triptych.client.errors import (
    ResumeMismatch,
    TriptychError,
    cancelled,
    cut_off,
    from_rpc_error,
)
from triptych.client.pauses import AsyncPause
from triptych.client.received import ResponseT

_Response_co = TypeVar("_Response_co", covariant=True)


class AsyncCall(Protocol[_Response_co]):
    """One attempt. Reading raises TriptychError."""

    async def __anext__(self) -> _Response_co: ...

    def cancel(self) -> object:
        """End it; the engine frees what it held."""
        ...


AsyncOpening = Callable[[RequestT, float | None], AsyncCall[ResponseT]]
"""Begins an attempt, without waiting: the request, and the seconds that it may take."""


class _Rpc(Protocol[_Response_co]):
    def __aiter__(self) -> AsyncIterator[_Response_co]: ...

    def cancel(self) -> bool: ...


class AsyncRpcCall(Generic[_Response_co]):
    """An attempt that is an RPC of its own."""

    def __init__(self, rpc: _Rpc[_Response_co]) -> None:
        self._rpc = rpc
        self._responses = aiter(rpc)
        self._cancelled = False

    async def __anext__(self) -> _Response_co:
        try:
            return await anext(self._responses)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        except asyncio.CancelledError:
            # gRPC's word for a call that was cancelled here, and a task's for itself.
            task = asyncio.current_task()
            if self._cancelled and (task is None or not task.cancelling()):
                raise cancelled() from None
            raise

    def cancel(self) -> None:
        """End it."""
        self._cancelled = True
        self._rpc.cancel()


class AsyncStream(Generic[RequestT, ResponseT]):
    """The pieces of an answer, as they come.

    Iterate over it, once; or let `answer()` join them. It is under way when you get it. Leaving it
    (the end of an `async with`, of the task, or the last reference) cancels what still runs.

    Iterating raises TriptychError: those of its module, after the retries of the options. After
    ResumeMismatch nothing more is read.
    """

    def __init__(
        self,
        opening: AsyncOpening[RequestT, ResponseT],
        attempts: Attempts[RequestT, ResponseT],
        pause: AsyncPause,
    ) -> None:
        self._cancelled = asyncio.Event()
        self._opening = opening
        self._pause = pause
        self._attempts = attempts
        self._call = self._opened()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        if hasattr(self, "_call"):  # the first attempt could be opened
            self._call.cancel()

    def __aiter__(self) -> AsyncIterator[ResponseT]:
        return self

    async def __anext__(self) -> ResponseT:
        while not self._attempts.complete:
            if self._cancelled.is_set():
                raise cancelled()
            try:
                response = await self._next_response()
            except TriptychError as error:
                await self._try_again(error)
                continue
            try:
                new = self._attempts.take(response)
            except ResumeMismatch:
                self._call.cancel()
                raise
            if new is not None:
                return new
        raise StopAsyncIteration

    def cancel(self) -> None:
        """End the request; a reader gets Cancelled. Nothing after its end."""
        self._cancelled.set()
        self._call.cancel()

    async def answer(self) -> Answer:
        """Read to the end: the pieces that are still to come, joined."""
        answer = Answer()
        async with self:
            async for piece in self:
                answer.add(piece)
        return answer

    async def _next_response(self) -> ResponseT:
        try:
            return await anext(self._call)
        except StopAsyncIteration:
            raise cut_off() from None

    async def _try_again(self, error: TriptychError) -> None:
        if not self._cancelled.is_set():
            wait = self._attempts.wait_after(error)
            await self._pause(wait, error.retry_after, self._cancelled)
            if not self._cancelled.is_set():
                self._call = self._opened()
                return
        raise cancelled() from error

    def _opened(self) -> AsyncCall[ResponseT]:
        return self._opening(self._attempts.request(), remaining(self._attempts.deadline))
