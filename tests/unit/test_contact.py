"""When a child counts as silent, by a clock that the test moves."""

import asyncio
import time
from collections.abc import Callable

import pytest

from triptych.services.cli import contact
from triptych.services.cli.contact import until_silent

_INTERVAL, _TIMEOUT = 0.01, 0.2


class Child:
    """Answers while `speaks`."""

    def __init__(self) -> None:
        self.speaks = asyncio.Event()
        self.speaks.set()
        self.answered = 0

    async def ready(self) -> bool:
        return True

    async def until_serving(self) -> None:
        return

    async def answers(self) -> bool:
        await self.speaks.wait()
        self.answered += 1
        return True

    async def close(self) -> None:
        return


class Refusing(Child):
    """Its socket is gone: no call comes through."""

    async def answers(self) -> bool:
        return False


class Clock:
    """Real time, and what a test adds to it."""

    def __init__(self, real: Callable[[], float]) -> None:
        self._real = real
        self.added = 0.0

    def monotonic(self) -> float:
        return self._real() + self.added


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(time.monotonic)
    monkeypatch.setattr(contact, "time", clock)
    return clock


def watch(child: Child) -> "asyncio.Task[None]":
    return asyncio.create_task(until_silent(child, _INTERVAL, _TIMEOUT))


def test_who_answers_is_never_silent_and_who_stops_is() -> None:
    async def scenario() -> None:
        child = Child()
        silent = watch(child)
        await asyncio.sleep(2 * _TIMEOUT)
        assert not silent.done()
        assert child.answered > 2
        child.speaks.clear()
        await asyncio.wait_for(silent, 20)

    asyncio.run(scenario())


def test_who_cannot_be_asked_is_silent() -> None:
    asyncio.run(asyncio.wait_for(until_silent(Refusing(), _INTERVAL, _TIMEOUT), 20))


def test_time_in_which_we_did_not_run_is_nobodys_silence(clock: Clock) -> None:
    async def scenario() -> None:
        child = Child()
        silent = watch(child)
        await asyncio.sleep(5 * _INTERVAL)
        child.speaks.clear()
        clock.added = 1000.0
        await asyncio.sleep(2 * _INTERVAL)
        assert not silent.done()
        child.speaks.set()
        await asyncio.sleep(2 * _TIMEOUT)
        assert not silent.done()
        silent.cancel()

    asyncio.run(scenario())


def test_a_watch_that_is_given_up_leaves_no_question_behind() -> None:
    async def scenario() -> set["asyncio.Task[object]"]:
        child = Child()
        child.speaks.clear()
        silent = watch(child)
        await asyncio.sleep(2 * _INTERVAL)
        silent.cancel()
        await asyncio.wait({silent})
        current = asyncio.current_task()
        return {task for task in asyncio.all_tasks() if task is not current}

    assert asyncio.run(scenario()) == set()
