"""The generations of one HTTP request, one a prompt, as one stream of gRPC's responses.

Each has its place among the open requests, its run and its end as on gRPC; leaving the `with` block
aborts what has not ended.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Generic, Self, TypeVar

from triptych.engine_core.errors import RequestError
from triptych.services.tokenizer.generation import Running
from triptych.services.tokenizer.openai_http.door import Door
from triptych.services.tokenizer.pieces import Piece
from triptych.services.tokenizer.validation import ValidRequest
from triptych.v1 import inference_pb2

ResponseT = TypeVar("ResponseT", bound=inference_pb2.GenerateResponse | inference_pb2.ChatResponse)
Respond = Callable[[Running, Piece], ResponseT]
Validate = Callable[[], Awaitable[ValidRequest]]


class Answers(Generic[ResponseT]):
    """Use once, as a context: `start`, then `next` until `ended`."""

    def __init__(self, respond: "Respond[ResponseT]", door: Door) -> None:
        self._respond = respond
        self._door = door
        self._stack = ExitStack()
        self._running: list[Running] = []
        self._changed: dict[int, None] = {}
        self._woken = asyncio.Event()
        self._open = 0
        self._failure: RequestError | None = None

    @property
    def ended(self) -> bool:
        """Whether every generation has given its last response."""
        return not self._open and self._failure is None

    async def start(self, validate: Sequence[Validate], size: int) -> None:
        """Admit, validate and submit: all of them, or none. `size`: bytes of the request's body.

        Raises RequestError.
        """
        for index in range(len(validate)):
            self._stack.enter_context(self._door.admission.admit(0 if index else size))
        valid = []
        for each in validate:
            valid.append(await each())
            await asyncio.sleep(0)  # others get their turn between the prompts of a long list
        for index, request in enumerate(valid):
            if index:
                await asyncio.sleep(0)
            running = self._door.generation.start(request, partial(self._wake, index))
            self._running.append(self._stack.enter_context(running))
            self._open += 1

    async def next(self) -> list[tuple[int, ResponseT]]:
        """Wait for responses: all there are now, each with its prompt's index.

        Raises the first error of any generation, once what came before it was given.
        """
        while True:
            self._woken.clear()
            if taken := self._take():
                return taken
            if self._failure is not None:
                raise self._failure
            await self._woken.wait()

    def fail(self, error: RequestError) -> None:
        """End as if the engine had failed."""
        self._failure = error
        self._woken.set()

    def __enter__(self) -> Self:
        self._door.open.add(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._door.open.discard(self)
        self._stack.close()

    def _wake(self, index: int) -> None:
        self._changed[index] = None
        self._woken.set()

    def _take(self) -> list[tuple[int, ResponseT]]:
        taken: list[tuple[int, ResponseT]] = []
        try:
            while self._changed:
                index = next(iter(self._changed))
                running = self._running[index]
                piece = running.stream.take()
                if piece is None:
                    del self._changed[index]
                    continue
                self._door.counters.responses_total += 1
                self._door.counters.tokens_total += piece.new_tokens
                taken.append((index, self._respond(running, piece)))
                if piece.usage is not None:
                    self._open -= 1
                    del self._changed[index]
        except RequestError as error:
            self._failure = error
        return taken
