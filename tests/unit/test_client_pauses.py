"""A back-off is over when the connection is there again. Whoever sat these out would time out."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import grpc
import pytest

from fake_engine import Act, fake_engine, told
from free_port import break_connections, free_ports
from triptych.client.api import AsyncClient, Client, ClientOptions, RetryPolicy
from triptych.client.pauses import ProbeCall, async_pause, pause

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


def nobody(seconds: float, wait_for_ready: bool) -> NoReturn:
    """A probe that must not be made."""
    raise AssertionError((seconds, wait_for_ready))


def test_what_the_engine_asked_for_is_waited_for() -> None:
    """Without a look at the connection."""
    waits = Waits()
    pause(nobody, 700.0, 600.0, waits)
    (waited,) = waits.waited
    assert waited is not None
    assert 600 < waited <= 700


def test_a_short_one_is_sat_out() -> None:
    waits = Waits()
    pause(nobody, 0.1, None, waits)
    assert len(waits.waited) == 1


def test_where_no_connection_was_lost_it_is_sat_out() -> None:
    """What was refused without a word of when to come again."""
    waits = Waits()
    with fake_engine() as engine, Client(engine.address) as client:
        client._pause(700.0, None, waits)
    last = waits.waited[-1]
    assert last is not None
    assert 600 < last <= 700


def test_a_cancel_ends_it() -> None:
    ended = threading.Event()
    (port,) = free_ports(1)
    with Client(f"127.0.0.1:{port}") as client:
        timer = threading.Timer(0.3, ended.set)
        timer.start()
        client._pause(700.0, None, ended)
        client._pause(700.0, 600.0, ended)
        timer.join()

    async def body() -> None:
        ended = asyncio.Event()
        ended.set()
        async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
            for asked in (None, 600.0):
                await async_pause(channel, 700.0, asked, ended)

    asyncio.run(body())


def test_a_client_that_is_closed_ends_it() -> None:
    (port,) = free_ports(1)
    with ThreadPoolExecutor(1) as pool, Client(f"127.0.0.1:{port}", PATIENT) as client:
        probing = threading.Event()
        probe = client._probe

        def probed(seconds: float, wait_for_ready: bool) -> ProbeCall:
            call = probe(seconds, wait_for_ready)
            if wait_for_ready:
                probing.set()
            return call

        given_up = threading.Event()
        pausing = pool.submit(pause, probed, 700.0, None, given_up)
        assert probing.wait(60)
        client.close()
        given_up.set()
        pausing.result(60)
