"""Small stub processes for the supervisor: they say through files what real ones say over gRPC."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from triptych.services.cli.child import ChildSpec
from triptych.services.cli.patience import Limits
from triptych.services.cli.restart_policy import RestartRules
from triptych.services.cli.stage import StageLinks
from triptych.services.cli.supervisor import Supervisor

WAIT = 60.0

# argv: parent pid, folder, name, mode. A life appends a line to <name>.lives, touches <name>.ready,
# and <name>.beat again and again. It appends its name to `stopped` on SIGTERM.
# Modes: run; exitN, die (at once); slow (never ready); stubborn (no SIGTERM); brief (all lives but
# the first exit with 3 after leaving words); late (all but the first are never ready); last (stops
# when all others have); follow (exits with 71 when there is a file `culprit`, which it removes).
STUB = """
import pathlib, signal, sys, time
from triptych.services.runtime.lifecycle import bind_to_parent
parent, folder, name, mode = sys.argv[1:]
folder = pathlib.Path(folder)
bind_to_parent(int(parent))
def stop(number, frame):
    while mode == "last" and not (folder / "stopped").exists():
        time.sleep(0.01)
    with (folder / "stopped").open("a") as log:
        log.write(name + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN if mode == "stubborn" else stop)
with (folder / f"{name}.lives").open("a+") as lives:
    lives.seek(0)
    first = lives.read() == ""
    lives.write("life\\n")
if mode.startswith("exit"):
    sys.stderr.write(f"triptych {name}: error: told to\\n")
    sys.exit(int(mode[4:]))
if mode == "die":
    signal.raise_signal(signal.SIGKILL)
if mode == "brief" and not first and not (folder / "mended").exists():
    (folder / f"{name}.words").write_text("told to")
    sys.exit(3)
if mode != "slow" and (mode != "late" or first):
    (folder / f"{name}.ready").touch()
while True:
    (folder / f"{name}.beat").touch()
    if mode == "follow" and (folder / "culprit").exists():
        (folder / "culprit").unlink()
        sys.exit(71)
    time.sleep(0.02)
"""

QUICK = Limits(
    probe_interval=0.02,
    heartbeat_interval=0.05,
    heartbeat_timeout=WAIT,
    restarts=RestartRules(first_delay=0.01, window=60.0),
)


class StubContact:
    """Reads a stub's files."""

    def __init__(self, folder: Path, name: str) -> None:
        self._ready = folder / f"{name}.ready"
        self._beat = folder / f"{name}.beat"

    async def ready(self) -> bool:
        return self._ready.exists()

    async def until_serving(self) -> None:
        while not self._ready.exists():
            await asyncio.sleep(0.01)

    async def answers(self) -> bool:
        before = self._beat_time()
        while self._beat_time() == before:
            await asyncio.sleep(0.01)
        return True

    async def close(self) -> None:
        return

    def _beat_time(self) -> int:
        return self._beat.stat().st_mtime_ns if self._beat.exists() else 0


def stub_links(folder: Path, changed: Callable[[], None] = lambda: None) -> StageLinks:
    """The links to stubs of that folder."""

    def ended(name: str) -> str:
        (folder / f"{name}.ready").unlink(missing_ok=True)
        words = folder / f"{name}.words"
        said = words.read_text() if words.exists() else ""
        words.unlink(missing_ok=True)
        return said

    return StageLinks(lambda name: StubContact(folder, name), changed, ended)


def stub_spec(folder: Path, name: str, mode: str = "run") -> ChildSpec:
    """A stub of that name."""
    command = (sys.executable, "-c", STUB, str(os.getpid()), str(folder), name, mode)
    return ChildSpec(name, command)


def supervise(
    folder: Path,
    modes: dict[str, str],
    on_ready: Callable[[Supervisor, asyncio.Event], Awaitable[None]] | None = None,
    limits: Limits = QUICK,
    seen: list[str] | None = None,
) -> int:
    """Run a supervisor of the named stubs; without `on_ready` it stops once all are ready.

    `seen` gets a line for each change of a state: name, state, reason.
    """

    async def main() -> int:
        stop = asyncio.Event()
        last: dict[str, str] = {}

        def changed() -> None:
            for stage in supervisor.states().stages:
                state = type(stage).State.Name(stage.state).removeprefix("STATE_")
                line = f"{stage.name} {state} {stage.reason}".strip()
                if seen is not None and last.get(stage.name) != line:
                    seen.append(line)
                last[stage.name] = line

        supervisor = Supervisor(
            [stub_spec(folder, name, mode) for name, mode in modes.items()],
            tuple(modes),
            stub_links(folder, changed),
            limits,
        )

        async def ready() -> None:
            if on_ready is None:
                stop.set()
            else:
                await on_ready(supervisor, stop)

        try:
            async with asyncio.timeout(WAIT):
                return await supervisor.run(stop, ready)
        finally:
            assert supervisor.pids == {}

    return asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    """Wait for it; the caller bounds the time."""
    while not condition():
        await asyncio.sleep(0.01)


def gone(pid: int) -> bool:
    """Whether there is no such process, or only a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def stopped(folder: Path) -> list[str]:
    """The stubs that got SIGTERM, in that order."""
    path = folder / "stopped"
    return path.read_text().split() if path.exists() else []


def lives(folder: Path, name: str) -> int:
    """How often a stub was started."""
    path = folder / f"{name}.lives"
    return len(path.read_text().splitlines()) if path.exists() else 0
