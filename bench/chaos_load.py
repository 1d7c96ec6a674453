"""The load of `make chaos`: a bounded number of clients that ask from the pool until they are told
to stop, and what each of them heard."""

import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from chaos_clients import Addresses, Doors
from chaos_ledger import CONNECTION, Behaviour, Heard
from chaos_reader import Plan, Pulse
from chaos_requests import Ask

_SESSION_MOST = 4
_AWAY_PAUSE = 0.3


@dataclass(frozen=True, slots=True)
class Stream:
    """One request that was asked under load."""

    ask: Ask
    plan: Plan
    heard: Heard


def draw_plan(dice: random.Random, ask: Ask) -> Plan:
    """What the client of one request does; seven in ten only read."""
    kind = dice.random()
    if kind < 0.12:
        most = ask.fields.get("max_tokens", 64)
        assert isinstance(most, int)
        return Plan(Behaviour.CANCELS, dice.randint(0, min(most, 64)), dice.uniform(0.02, 1.5))
    if kind < 0.20 and ask.door in ("grpc", "http-stream"):
        return Plan(Behaviour.SLOW, seconds=dice.uniform(0.05, 0.4))
    if kind < 0.27 and ask.door != "session":
        return Plan(Behaviour.DEADLINE, seconds=dice.uniform(0.05, 3.0))
    return Plan()


async def answer_all(where: Addresses, pool: Sequence[Ask], together: int) -> dict[int, Heard]:
    """What each request is answered when nobody is killed, by its number.

    Raises RuntimeError for one that fails and should not, or does not and should.
    """
    room = asyncio.Semaphore(together)
    answers: dict[int, Heard] = {}

    async def one(doors: Doors, ask: Ask) -> None:
        async with room:
            (heard,) = await doors.ask([(ask, Plan())])
        if bool(heard.error) != ask.refused:
            raise RuntimeError(f"undisturbed: {heard.error} {heard.message}\n{ask.line()}")
        answers[ask.number] = heard

    async with Doors(where, Pulse()) as doors, asyncio.TaskGroup() as group:
        for ask in pool:
            group.create_task(one(doors, ask))
    return answers


@dataclass(slots=True)
class Load:
    """So many clients at once, each with connections of its own. `done`: in order of their ends."""

    where: Addresses
    pool: Sequence[Ask]
    seed: int
    clients: int
    pulse: Pulse = field(default_factory=Pulse)
    done: list[Stream] = field(default_factory=list)
    _running: dict[int, list[tuple[Ask, Plan]]] = field(default_factory=dict)

    async def run(self, stop: asyncio.Event, phase: str) -> None:
        """Ask until `stop` is set and every open request has ended."""
        async with asyncio.TaskGroup() as group:
            for number in range(self.clients):
                dice = random.Random(f"chaos client {self.seed} {phase} {number}")
                group.create_task(self._client(number, dice, stop))

    async def _client(self, number: int, dice: random.Random, stop: asyncio.Event) -> None:
        async with Doors(self.where, self.pulse) as doors:
            while not stop.is_set():
                asks = self._next(dice)
                self._running[number] = asks
                heard = await doors.ask(asks)
                del self._running[number]
                self.done += [
                    Stream(ask, plan, each) for (ask, plan), each in zip(asks, heard, strict=True)
                ]
                if any(each.error == CONNECTION for each in heard):
                    await asyncio.sleep(_AWAY_PAUSE)

    def _next(self, dice: random.Random) -> list[tuple[Ask, Plan]]:
        first = dice.choice(self.pool)
        asks = [first]
        if first.door == "session":
            others = [ask for ask in self.pool if ask.door == "session"]
            asks += dice.sample(others, dice.randint(0, _SESSION_MOST - 1))
        return [(ask, draw_plan(dice, ask)) for ask in asks]

    def open_requests(self) -> list[str]:
        """Those that have not ended, for people."""
        return [ask.line() for asks in self._running.values() for ask, _ in asks]


async def first_answer(where: Addresses, ask: Ask, patience: float) -> float | None:
    """Ask again and again, each time over a new connection; when the first answer came."""
    until = time.perf_counter() + patience
    while time.perf_counter() < until:
        async with Doors(where, Pulse()) as doors:
            (heard,) = await doors.ask([(ask, Plan())])
        if not heard.error:
            return heard.over
        await asyncio.sleep(0.03)
    return None
