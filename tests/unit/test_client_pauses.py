"""A back-off is over when the connection is there again. Whoever sat these out would time out."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from fake_engine import Act, fake_engine, told
from free_port import break_connections, free_ports
from triptych.client.api import AsyncClient, Client, ClientOptions, RetryPolicy
from triptych.client.pauses import async_pause, pause

PATIENT = ClientOptions(retry=RetryPolicy(first_wait=600, longest_wait=600))
pytestmark = pytest.mark.timeout(120)


def test_it_ends_with_the_connection() -> None:
    (port,) = free_ports(1)
    hold = threading.Event()
    with ThreadPoolExecutor(1) as pool, Client(f"127.0.0.1:{port}", PATIENT) as client:
        with fake_engine(port=port) as engine:
            engine.expect(Act(told("he", end=False), hold=hold))
            stream = client.generate("say")
            assert next(stream).text == "he"
        hold.set()
        with stream:
            rest = pool.submit(list, stream)
            break_connections(port)
            with fake_engine(port=port) as engine:
                engine.expect(Act(told("hello")))
                assert [piece.text for piece in rest.result(60)] == ["llo"]


def test_with_asyncio_too() -> None:
    (port,) = free_ports(1)
    hold = threading.Event()

    async def body() -> None:
        async with AsyncClient(f"127.0.0.1:{port}", PATIENT) as client, asyncio.timeout(60):
            with fake_engine(port=port) as engine:
                engine.expect(Act(told("he", end=False), hold=hold))
                stream = client.generate("say")
                assert (await anext(stream)).text == "he"
            hold.set()
            rest = asyncio.create_task(anext(stream))
            await asyncio.to_thread(break_connections, port)
            with fake_engine(port=port) as engine:
                engine.expect(Act(told("hello")))
                assert (await rest).text == "llo"

    asyncio.run(body())


class Waits(threading.Event):
    """Never set; says how long was waited for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waited.append(timeout)
        return False


def test_what_the_engine_asked_for_is_waited_for() -> None:
    """Without a look at the connection: a closed channel has none."""
    waits = Waits()
    with grpc.insecure_channel("127.0.0.1:1") as channel:
        pass
    pause(channel, 700.0, 600.0, waits)
    assert waits.waited == [700.0]


def test_a_cancel_ends_it() -> None:
    cancelled = threading.Event()
    cancelled.set()
    with grpc.insecure_channel("127.0.0.1:1") as channel:
        for asked in (None, 600.0):
            pause(channel, 700.0, asked, cancelled)

    async def body() -> None:
        ended = asyncio.Event()
        ended.set()
        async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
            for asked in (None, 600.0):
                await async_pause(channel, 700.0, asked, ended)

    asyncio.run(body())
