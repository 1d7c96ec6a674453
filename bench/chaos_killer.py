"""Who `make chaos` kills, and when: the processes of one engine, found below its `triptych serve`.

Nobody else's: pids come from the tree of our own child, and a signal goes through a pidfd that was
opened while the process was known to be that one.
"""

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent))
from chaos_pauses import ON_THE_WAY, Kill

STAGES = ("executor-0", "scheduler", "tokenizer-0")
_POLL = 0.02
_FREEZE = (0.2, 1.0)
_HANG_SECONDS = 30.0
"""After which a stopped process that nobody ended is ended here, and reported."""


def stage_pids(supervisor: int) -> dict[str, int]:
    """The stages that run now, by name: children of the supervisor, by the names they give
    themselves once they run."""
    found = {}
    try:
        children = psutil.Process(supervisor).children()
    except psutil.NoSuchProcess:
        return {}
    for child in children:
        try:
            name = _stage_of(child)
        except psutil.Error:
            continue
        if name is not None:
            found[name] = child.pid
    return found


def _stage_of(process: psutil.Process) -> str | None:
    if process.status() == psutil.STATUS_ZOMBIE:
        return None
    name = process.name()
    if name in STAGES:
        return name
    arguments = process.cmdline()  # one that was started again is not forked, and so not named
    for stage in STAGES:
        if f"triptych.services.{stage.partition('-')[0]}" in arguments[:4]:
            return stage
    return None


@dataclass(slots=True)
class Watched:
    """The stages' pids over time. `unasked`: those that ended though nobody here ended them."""

    supervisor: int
    pids: dict[str, int] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)
    unasked: list[str] = field(default_factory=list)
    everyone: set[tuple[int, float]] = field(default_factory=set)
    """Pid and start of every process that was seen below the supervisor, at any depth."""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(_POLL)

    def look(self) -> None:
        """Once."""
        pids = stage_pids(self.supervisor)
        for name, pid in self.pids.items():
            if pids.get(name) != pid and pid not in self.asked:
                self.unasked.append(f"{time.perf_counter():.3f} {name} (pid {pid})")
                self.asked.add(pid)  # said once
        self.pids |= pids
        try:
            below = psutil.Process(self.supervisor).children(recursive=True)
            self.everyone |= {(each.pid, each.create_time()) for each in below}
        except psutil.Error:
            pass  # gone meanwhile: seen the next time, or not at all

    def left_over(self) -> list[int]:
        """Processes that were below the supervisor once, are no more, and still run."""
        below = {each.pid for each in psutil.Process(self.supervisor).children(recursive=True)}
        left = []
        for pid, start in self.everyone:
            try:
                process = psutil.Process(pid)
                same = process.create_time() == start
                if same and process.status() != psutil.STATUS_ZOMBIE and pid not in below:
                    left.append(pid)
            except psutil.NoSuchProcess:
                continue
        return left


@dataclass(slots=True)
class Killer:
    """Kills and freezes stages of one engine until it is told to stop.

    It waits until every stream has gone on after the kill before (`calm`, told its time), and then
    for a random time, `mean` seconds on average. One in four has another at its heels, during its
    recovery, but never a third: whoever computes one request three times and dies each time gives
    it up, and cannot know that somebody outside did it. One in twelve is a stop, half of them never
    continued: the supervisor has to end those. `tokenizer_ended` is told of every end of a
    tokenizer process, and waits until it is back.
    """

    watched: Watched
    dice: random.Random
    mean: float
    tokenizer_ended: Callable[[Kill], Awaitable[None]]
    calm: Callable[[float], bool]
    kills: list[Kill] = field(default_factory=list)
    stubborn: list[str] = field(default_factory=list)
    _open: int = 0  # kills that are not over

    async def run(self, stages: Sequence[str], until: float) -> None:
        """Until then; what was begun is waited for."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._until_calm(until)
                await asyncio.sleep(self.dice.expovariate(1 / self.mean))
                if time.perf_counter() >= until:
                    break
                self._one(group, self.dice.choice(stages))
                if self.dice.random() < 0.25:
                    await asyncio.sleep(self.dice.uniform(0.0, 0.8))
                    self._one(group, self.dice.choice(stages))

    async def _until_calm(self, until: float) -> None:
        while (self._open or self._recovering()) and time.perf_counter() < until:
            await asyncio.sleep(_POLL)

    def _one(self, group: asyncio.TaskGroup, stage: str) -> None:
        pid = self.watched.pids.get(stage)
        if (
            pid is None
            or pid in self.watched.asked
            or stage_pids(self.watched.supervisor).get(stage) != pid
        ):
            return  # it is not there now
        kind = self.dice.random()
        what = "kill" if kind > 1 / 12 else "freeze" if kind > 1 / 24 else "hang"
        fd = os.pidfd_open(pid)
        kill = Kill(time.perf_counter(), stage, pid, what, self._recovering())
        if what != "freeze":
            self.watched.asked.add(pid)
        try:
            sign = signal.SIGKILL if what == "kill" else signal.SIGSTOP
            signal.pidfd_send_signal(fd, sign)
        except ProcessLookupError:
            os.close(fd)
            return
        self.kills.append(kill)
        group.create_task(self._follow(self._after(kill, fd)))
        if stage.startswith("tokenizer") and what != "freeze":
            group.create_task(self._follow(self.tokenizer_ended(kill)))

    def _recovering(self) -> bool:
        return bool(self.kills) and not self.calm(self.kills[-1].when + ON_THE_WAY)

    async def _follow(self, work: Awaitable[None]) -> None:
        self._open += 1
        await work
        self._open -= 1

    async def _after(self, kill: Kill, fd: int) -> None:
        """Continue what is only frozen; end what nobody ends."""
        try:
            if kill.what == "freeze":
                await asyncio.sleep(self.dice.uniform(*_FREEZE))
                signal.pidfd_send_signal(fd, signal.SIGCONT)
                return
            until = time.perf_counter() + _HANG_SECONDS
            while psutil.pid_exists(kill.pid) and self.watched.pids.get(kill.stage) == kill.pid:
                if time.perf_counter() > until:
                    self.stubborn.append(f"{kill.stage} (pid {kill.pid}) after its {kill.what}")
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
                    return
                await asyncio.sleep(_POLL)
        except ProcessLookupError:
            pass
        finally:
            os.close(fd)
