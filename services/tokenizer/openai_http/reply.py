"""One generation over HTTP, from its checked body to its last byte.

Errors before the first piece are JSON with their own status, in streams too: headers go out with
the first piece, or with the first keep-alive comment when that takes long. An error after that is
one event, and the stream ends without [DONE]. Whoever hangs up, streaming or not, ends the work;
a connection that nobody reads is closed (see http_port), and so has hung up.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from triptych.engine_core.errors import InvalidRequest
from triptych.services.tokenizer.openai_http.answers import Answers, ResponseT, Validate
from triptych.services.tokenizer.openai_http.errors import HttpError, http_error
from triptych.services.tokenizer.openai_http.sse import HEADERS, KEEP_ALIVE, error_event
from triptych.services.tokenizer.output_validation import MAX_HELD
from triptych.v1 import inference_pb2

WrittenT_contra = TypeVar(
    "WrittenT_contra",
    bound=inference_pb2.GenerateResponse | inference_pb2.ChatResponse,
    contravariant=True,
)


class Writer(Protocol[WrittenT_contra]):
    """Turns responses into an answer's bytes."""

    def add(self, prompt: int, response: WrittenT_contra, /) -> bytes:
        """Take the next response; the bytes that can go out now."""

    def end(self) -> bytes:
        """The bytes that end the answer."""


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be done, and how errors name its fields. `size`: bytes of the body."""

    validate: Sequence[Validate]
    size: int
    names: Mapping[str, str]
    stream: bool


class GenerationReply(Response, Generic[ResponseT]):
    """An ASGI response that runs the generations itself."""

    def __init__(
        self,
        answers: Answers[ResponseT],
        work: Work,
        writer: Writer[ResponseT],
        keep_alive: float,
    ) -> None:
        """`keep_alive`: seconds of silence in a stream before a comment is sent."""
        self._answers = answers
        self._work = work
        self._writer = writer
        self._keep_alive = keep_alive
        self._begun = False
        self._held = 0
        self._quiet = True
        self._writing = False
        self._gone = False
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, unless the client hangs up before."""
        task = asyncio.current_task()
        assert task is not None, "ASGI applications run in tasks"
        watch = asyncio.create_task(self._watch(receive, send, task))
        try:
            with self._answers:
                await self._answer(send)
        except asyncio.CancelledError:
            if not self._gone:
                raise
            task.uncancel()
        finally:
            watch.cancel()

    async def _answer(self, send: Send) -> None:
        try:
            await self._answers.start(self._work.validate, self._work.size)
            while not self._answers.ended:
                taken = await self._answers.next()
                if not self._work.stream:
                    self._hold(taken)
                events = b"".join([self._writer.add(*each) for each in taken])
                if events:
                    await self._write(send, events)
            last = self._writer.end()
        except Exception as error:  # the top of the request: what is no RequestError is logged
            await self._fail(send, http_error(error, self._work.names))
            return
        if self._work.stream:
            await self._write(send, last, more=False)
        else:
            await send_whole(send, 200, last, {})

    def _hold(self, taken: Sequence[tuple[int, ResponseT]]) -> None:
        """Of an answer that is kept until it is whole, the text is small, and logprobs need not be.
        Raises InvalidRequest."""
        for _, response in taken:
            for row in response.logprobs:
                self._held += 1 + len(row.top) + len(row.vocabulary_logprobs)
        if self._held > MAX_HELD:
            raise InvalidRequest(
                "logprobs",
                f"the answer has more than {MAX_HELD} tokens and alternatives; stream it",
            )

    async def _write(self, send: Send, events: bytes, *, more: bool = True) -> None:
        self._writing, self._quiet = True, False
        if not self._begun:
            self._begun = True
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await send({"type": "http.response.body", "body": events, "more_body": more})
        self._writing = False

    async def _fail(self, send: Send, error: HttpError) -> None:
        if self._begun:
            await self._write(send, error_event(error), more=False)
        else:
            self._begun = True
            await send_whole(send, error.status, error.body(), error.headers())

    async def _watch(self, receive: Receive, send: Send, task: "asyncio.Task[object]") -> None:
        """Wait for the client to hang up, and speak when the stream has been silent."""
        while True:
            try:
                async with asyncio.timeout(self._keep_alive if self._work.stream else None):
                    message: Message = await receive()
            except TimeoutError:
                if self._quiet and not self._writing:
                    await self._write(send, KEEP_ALIVE)
                self._quiet = True
                continue
            if message["type"] == "http.disconnect":
                self._hang_up(task)
                return

    def _hang_up(self, task: "asyncio.Task[object]") -> None:
        self._gone = True
        task.cancel()


async def send_whole(send: Send, status: int, body: bytes, more: Mapping[str, str]) -> None:
    """A JSON answer of known length."""
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *((name.encode(), value.encode()) for name, value in more.items()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
