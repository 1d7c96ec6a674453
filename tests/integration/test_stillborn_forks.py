"""A fork that ends before it is ready is followed by a program, which has the code of the disk."""

import asyncio
import os
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from stub_children import QUICK, WAIT, stub_links, stub_spec, until
from triptych.services.cli.child import ChildSpec
from triptych.services.cli.stage import READY
from triptych.services.cli.supervisor import Supervisor


def test_a_fork_that_cannot_start_costs_one_life_each_time(tmp_path: Path) -> None:
    """As after an upgrade: what the fork server has imported does not fit the code on disk."""
    asked: list[str] = []

    def fork(spec: ChildSpec) -> int | None:
        asked.append(spec.name)
        if len(asked) == 1:
            return None  # the first start
        return os.posix_spawn(sys.executable, [sys.executable, "-c", "exit(1)"], {})

    def lives(count: int) -> bool:
        return len((tmp_path / "a.lives").read_text().splitlines()) == count

    async def main() -> None:
        links = replace(stub_links(tmp_path), fork=fork)
        supervisor = Supervisor([stub_spec(tmp_path, "a")], ("a",), links, QUICK)
        stop = asyncio.Event()

        async def kill_twice() -> None:
            for count in (2, 3):
                os.kill(supervisor.pids["a"], signal.SIGKILL)
                await until(partial(lives, count))
                await until(lambda: supervisor.stage("a").state == READY)
                assert len(asked) == count
            stop.set()

        async with asyncio.timeout(WAIT):
            assert await supervisor.run(stop, kill_twice) == 0

    asyncio.run(main())
