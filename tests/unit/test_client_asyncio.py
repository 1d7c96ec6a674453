"""The asyncio client against the scripted service; what both share is tested with the other."""

import asyncio
import threading
from collections.abc import Awaitable, Callable

import grpc
import pytest

from fake_engine import Act, FakeEngine, fake_engine, told
from triptych.client.api import (
    AsyncClient,
    Cancelled,
    ChatResponse,
    ClientOptions,
    DeadlineExceeded,
    InvalidRequest,
    QueueFull,
    ResumeMismatch,
    RetryPolicy,
    Unavailable,
)
from triptych.engine_core import errors as engine_errors
from triptych.v1 import common_pb2

QUICK = RetryPolicy(attempts=3, first_wait=0.001, longest_wait=0.002)
DOWN = engine_errors.Unavailable("down", retry_after_ms=1)


def run(body: Callable[[FakeEngine, AsyncClient], Awaitable[None]], *acts: Act) -> None:
    """Run the body with a client of a service that has these acts."""

    async def inner(engine: FakeEngine) -> None:
        options = ClientOptions(timeout=60, retry=QUICK)
        async with AsyncClient(engine.address, options) as client, asyncio.timeout(100):
            await body(engine, client)

    with fake_engine() as engine:
        engine.expect(*acts)
        asyncio.run(inner(engine))


async def asked(engine: FakeEngine, requests: int) -> None:
    """Until so many have come to the service."""
    while len(engine.requests) < requests:
        await asyncio.sleep(0.005)


def test_pieces_and_whole_answers() -> None:
    async def body(engine: FakeEngine, client: AsyncClient) -> None:
        assert [piece.text async for piece in client.generate("x")] == ["he", "llo"]
        answer = await client.generate([1, 2]).answer()
        assert (answer.text, answer.usage.completion_tokens) == ("hello", 5)

    run(body, Act(told("hello", 2)), Act(told("hello", 2)))


def test_retries_resume_and_their_ends() -> None:
    async def body(engine: FakeEngine, client: AsyncClient) -> None:
        assert [piece.text async for piece in client.generate("x")] == ["ab", "c", "def"]
        mixed = client.generate("x")
        assert (await anext(mixed)).text == "ab"
        with pytest.raises(ResumeMismatch):
            await anext(mixed)
        assert [piece async for piece in mixed] == []
        with pytest.raises(QueueFull):
            await client.generate("x").answer()
        with pytest.raises(InvalidRequest):
            await client.generate("").answer()

    run(
        body,
        Act(error=DOWN),
        Act(told("ab", end=False), bare=grpc.StatusCode.UNAVAILABLE),
        Act(told("abcdef", 3)),
        Act(told("ab", end=False), error=DOWN),
        Act(told("aXdef", 3)),
        *[Act(error=engine_errors.QueueFull("full", retry_after_ms=1))] * 3,
        Act(error=engine_errors.InvalidRequest("text", "is empty")),
    )


def test_leaving_a_stream_cancels_it() -> None:
    hold = threading.Event()

    async def body(engine: FakeEngine, client: AsyncClient) -> None:
        async with client.generate("x") as stream:
            assert (await anext(stream)).text == "abc"
        assert await asyncio.to_thread(engine.cancelled.wait, 30)
        with pytest.raises(Cancelled):
            await anext(stream)
        hold.set()

    run(body, Act(told("abc", end=False), hold=hold))


def test_cancel_from_another_task_and_of_the_task_itself() -> None:
    hold = threading.Event()

    async def body(engine: FakeEngine, client: AsyncClient) -> None:
        stream = client.generate("x")
        await anext(stream)
        asyncio.get_running_loop().call_later(0.05, stream.cancel)
        with pytest.raises(Cancelled):
            await anext(stream)

        both = client.generate("x")
        task = asyncio.create_task(both.answer())
        await asked(engine, 2)
        both.cancel()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):  # the task's own is never swallowed
            await task

        engine.cancelled.clear()
        task = asyncio.create_task(client.generate("x").answer())
        await asked(engine, 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(engine.cancelled.wait, 30)
        hold.set()

    run(body, *[Act(told("abc", end=False), hold=hold)] * 3)


def test_a_deadline_and_a_cancelled_wait() -> None:
    hold = threading.Event()

    async def body(engine: FakeEngine, client: AsyncClient) -> None:
        stream = client.generate("x", timeout=1.5)
        assert (await anext(stream)).text == "abc"
        with pytest.raises(DeadlineExceeded):
            await anext(stream)
        hold.set()
        waiting = client.generate("x")
        asyncio.get_running_loop().call_later(0.1, waiting.cancel)
        with pytest.raises(Cancelled):
            await anext(waiting)

    patient = engine_errors.Unavailable("down", retry_after_ms=10_000)
    run(body, Act(told("abc", end=False), hold=hold), Act(error=patient))


def test_unary_calls() -> None:
    async def body(engine: FakeEngine, client: AsyncClient) -> None:
        assert await client.tokenize("hi") == [104, 105]
        assert await client.detokenize([104, 105]) == "hi"
        assert [model.name for model in await client.models()] == ["fake"]

    run(body, Act(error=DOWN), Act())


def test_a_session() -> None:
    chat = ChatResponse(text="hi", finish_reason=common_pb2.FINISH_REASON_STOP)
    chat.usage.completion_tokens = 1

    async def body(engine: FakeEngine, client: AsyncClient) -> None:
        async with client.session() as session:
            bad, first, talk = session.generate(""), session.generate("1"), session.chat("2")
            assert (await talk.answer()).text == "hi"
            assert (await first.answer()).text == "first"
            with pytest.raises(InvalidRequest):
                await bad.answer()
            cancelled = session.generate("3")
            await anext(cancelled)
            cancelled.cancel()
            with pytest.raises(Cancelled):
                await anext(cancelled)
            assert await asyncio.to_thread(engine.session_cancels.get, timeout=30) == 4
            late = session.generate("4", timeout=1.0)
            with pytest.raises(DeadlineExceeded):
                await late.answer()
            assert engine.sessions == 1
            broken = session.generate("5")
            assert (await broken.answer()).text == "abcdef"
            assert engine.sessions == 2
            open_still = session.generate("6")
            await anext(open_still)
        with pytest.raises(Cancelled):
            await anext(open_still)
        with pytest.raises(Cancelled):
            session.generate("7")

    run(
        body,
        Act(error=engine_errors.InvalidRequest("text", "is empty")),
        Act(told("first", 2)),
        Act([chat]),
        Act(told("abc", end=False)),
        Act(told("abc", end=False)),
        Act(told("abc", end=False), bare=grpc.StatusCode.UNAVAILABLE),
        Act(told("abcdef", 2)),
        Act(told("abc", end=False)),
    )


def test_nothing_listens() -> None:
    async def body() -> None:
        async with AsyncClient("127.0.0.1:1", ClientOptions(retry=QUICK)) as client:
            with pytest.raises(Unavailable):
                await client.generate("x").answer()
            with pytest.raises(Unavailable):
                await client.tokenize("x")
            async with client.session() as session:
                with pytest.raises(Unavailable):
                    await session.generate("x").answer()

    asyncio.run(body())
