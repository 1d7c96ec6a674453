"""The supervisor over real processes: small stub children that say when they are ready."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from triptych.services.cli.child import ChildSpec
from triptych.services.cli.supervisor import Limits, Supervisor
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.runtime.run_dir import RunDir

_WAIT = 20.0

# argv: parent pid, folder, name, mode. Touches <name>.ready; appends to `stopped` on SIGTERM.
_STUB = """
import pathlib, signal, sys, time
from triptych.services.runtime.lifecycle import bind_to_parent
parent, folder, name, mode = sys.argv[1:]
folder = pathlib.Path(folder)
bind_to_parent(int(parent))
def stop(number, frame):
    with (folder / "stopped").open("a") as log:
        log.write(name + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN if mode == "stubborn" else stop)
if mode.startswith("exit"):
    sys.stderr.write(f"triptych {name}: error: told to\\n")
    sys.exit(int(mode[4:]))
if mode == "die":
    signal.raise_signal(signal.SIGKILL)
if mode == "brief" and (folder / f"{name}.ready").exists():
    sys.exit(3)
if mode != "slow":
    (folder / f"{name}.ready").touch()
while True:
    time.sleep(60)
"""

# Runs a supervisor of two stubs, to be killed. argv: folder.
_DRIVER = """
import asyncio, os, pathlib, sys
from triptych.services.cli.child import ChildSpec
from triptych.services.cli.supervisor import Limits, Supervisor
folder, stub = sys.argv[1], sys.argv[2]
names = ("a", "b")
async def probe(name): return (pathlib.Path(folder) / f"{name}.ready").exists()
specs = [ChildSpec(n, (sys.executable, "-c", stub, str(os.getpid()), folder, n, "run"))
         for n in names]
async def main():
    supervisor = Supervisor(specs, names, probe, Limits())
    async def ready(): print(*supervisor.pids.values(), flush=True)
    await supervisor.run(asyncio.Event(), ready)
asyncio.run(main())
"""


def spec(folder: Path, name: str, mode: str = "run") -> ChildSpec:
    command = (sys.executable, "-c", _STUB, str(os.getpid()), str(folder), name, mode)
    return ChildSpec(name, command)


def supervise(
    folder: Path,
    modes: dict[str, str],
    on_ready: Callable[[Supervisor, asyncio.Event], Awaitable[None]] | None = None,
    limits: Limits | None = None,
) -> int:
    """Run a supervisor of the named stubs; without `on_ready` it stops once all are ready."""

    async def probe(name: str) -> bool:
        return (folder / f"{name}.ready").exists()

    async def main() -> int:
        stop = asyncio.Event()
        supervisor = Supervisor(
            [spec(folder, name, mode) for name, mode in modes.items()],
            tuple(modes),
            probe,
            limits or Limits(probe_interval=0.02, restart_delay=0.01),
        )

        async def ready() -> None:
            if on_ready is None:
                stop.set()
            else:
                await on_ready(supervisor, stop)

        try:
            async with asyncio.timeout(_WAIT):
                return await supervisor.run(stop, ready)
        finally:
            assert supervisor.pids == {}

    return asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def stopped(folder: Path) -> list[str]:
    path = folder / "stopped"
    return path.read_text().split() if path.exists() else []


def test_a_clean_stop_goes_in_order_and_exits_0(tmp_path: Path) -> None:
    assert supervise(tmp_path, {"t": "run", "s": "run", "e": "run"}) == 0
    assert stopped(tmp_path) == ["t", "s", "e"]


def test_a_stop_during_start_up_exits_0(tmp_path: Path) -> None:
    async def main() -> int:
        async def never(_name: str) -> bool:
            return False

        supervisor = Supervisor([spec(tmp_path, "a")], ("a",), never, Limits())
        stop = asyncio.Event()
        running = asyncio.create_task(supervisor.run(stop))
        await until((tmp_path / "a.ready").exists)
        stop.set()
        return await running

    assert asyncio.run(main()) == 0
    assert stopped(tmp_path) == ["a"]


@pytest.mark.parametrize(("mode", "code"), [("exit2", 2), ("exit5", 5), ("exit0", 1), ("die", 1)])
def test_a_child_that_ends_during_start_up_ends_the_engine(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], mode: str, code: int
) -> None:
    assert supervise(tmp_path, {"a": "slow", "b": mode}) == code
    if code > 1:
        assert capfd.readouterr().err == "triptych b: error: told to\n"


def test_start_up_takes_too_long(tmp_path: Path) -> None:
    limits = Limits(startup_timeout=0.5, probe_interval=0.02)
    with pytest.raises(StartupError, match=r"^a not ready after 0\.5 s"):
        supervise(tmp_path, {"a": "slow", "b": "run"}, limits=limits)


def test_a_child_that_is_killed_is_started_again(tmp_path: Path) -> None:
    async def kill_both(supervisor: Supervisor, stop: asyncio.Event) -> None:
        before = supervisor.pids
        for pid in before.values():
            os.kill(pid, signal.SIGKILL)
        await until(lambda: len({*supervisor.pids.values()} - {*before.values()}) == 2)
        stop.set()

    assert supervise(tmp_path, {"a": "run", "b": "run"}, kill_both) == 0


def test_it_is_started_again_with_the_command_of_now(tmp_path: Path) -> None:
    async def replace(supervisor: Supervisor, stop: asyncio.Event) -> None:
        supervisor.replace_spec(ChildSpec("a", (*spec(tmp_path, "a").command[:-2], "new", "run")))
        os.kill(supervisor.pids["a"], signal.SIGKILL)
        await until((tmp_path / "new.ready").exists)
        stop.set()

    assert supervise(tmp_path, {"a": "run"}, replace) == 0


def test_a_child_that_cannot_be_kept_running_ends_the_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def kill(supervisor: Supervisor, _stop: asyncio.Event) -> None:
        os.kill(supervisor.pids["a"], signal.SIGKILL)

    limits = Limits(probe_interval=0.02, restart_delay=0.01, max_restarts=2)
    assert supervise(tmp_path, {"a": "brief", "b": "run"}, kill, limits) == 1
    assert stopped(tmp_path) == ["b"]
    assert [record.getMessage() for record in caplog.records] == [
        "a was killed by SIGKILL: starting it again in 0.01 s",
        "a exited with code 3: starting it again in 0.02 s",
        "a exited with code 3, 3 times within 60 s: giving up",
    ]


def test_a_child_that_does_not_stop_is_killed(tmp_path: Path) -> None:
    begin = time.monotonic()
    limits = Limits(grace=0.2, probe_interval=0.02)
    assert supervise(tmp_path, {"a": "stubborn", "b": "run"}, limits=limits) == 0
    assert stopped(tmp_path) == ["b"]
    assert time.monotonic() - begin < _WAIT / 2


def test_what_on_ready_raises_comes_out_after_the_children_are_gone(tmp_path: Path) -> None:
    async def fail(_supervisor: Supervisor, _stop: asyncio.Event) -> None:
        raise StartupError("no panel")

    with pytest.raises(StartupError, match="no panel"):
        supervise(tmp_path, {"a": "run"}, fail)
    assert stopped(tmp_path) == ["a"]


def test_no_orphans_after_kill_minus_nine_of_the_supervisor(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _DRIVER, str(tmp_path), _STUB]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == 2
        assert not any(gone(pid) for pid in pids)
        driver.kill()
    deadline = time.monotonic() + _WAIT
    while not all(gone(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def serve(*flags: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "triptych.services.cli", "serve", *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_serve_refuses_a_run_directory_in_use(tmp_path: Path) -> None:
    run_dir = RunDir.open(tmp_path / "run")
    lock = run_dir.lock("supervisor")
    ended = serve("--model", str(tmp_path), "--run-dir", str(run_dir.path))
    os.close(lock)
    assert (ended.returncode, ended.stdout) == (2, "")
    said = f"triptych serve: error: another supervisor runs in {run_dir.path} (pid {os.getpid()})"
    assert ended.stderr.startswith(said)
    assert ended.stderr.count("\n") == 1


def test_serve_refuses_a_missing_model_in_one_line(tmp_path: Path) -> None:
    ended = serve("--model", str(tmp_path / "gone.gguf"), "--run-dir", str(tmp_path / "run"))
    assert ended.returncode == 2
    assert ended.stderr.startswith("triptych serve: error: ")
    assert "gone.gguf" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_serve_refuses_bad_flags_in_one_line() -> None:
    ended = serve("--model", "m", "--max-num-seqs", "-3")
    assert ended.returncode == 2
    said = "triptych serve: error: max_num_seqs: '-3' must be greater than or equal to 1"
    assert ended.stderr == f"{said} (--max-num-seqs)\n"
