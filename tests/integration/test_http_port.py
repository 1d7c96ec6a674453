"""The HTTP port before anything is served on it."""

import asyncio

import pytest

from triptych.services.runtime.lifecycle import StartupError
from triptych.services.tokenizer.http_port import HttpPort


def port() -> HttpPort:
    def never() -> None:
        raise AssertionError("nothing is opened here")

    return HttpPort(never, "0", pytest.fail)  # type: ignore[arg-type]  # never called


def test_a_port_is_shared_only_by_those_who_say_so() -> None:
    async def scenario() -> None:
        first, second, third = port(), port(), port()
        first.bind("127.0.0.1", 0, shared=True)
        number = int(first.address.rpartition(":")[2])
        second.bind("127.0.0.1", number, shared=True)
        assert second.address == first.address
        with pytest.raises(StartupError, match="use another --http-port"):
            third.bind("127.0.0.1", number, shared=False)
        await first.stop()
        await second.stop()
        third.bind("127.0.0.1", number, shared=False)
        await third.stop()

    asyncio.run(scenario())


def test_an_address_that_is_not_ours_is_one_clear_line() -> None:
    with pytest.raises(StartupError, match=r"port 80 on 192\.0\.2\.1"):
        port().bind("192.0.2.1", 80, shared=False)
