"""The supervisor over real processes: small stub children that say when they are ready."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from stub_children import (
    QUICK,
    STUB,
    WAIT,
    gone,
    stopped,
    stub_links,
    stub_spec,
    supervise,
    until,
)
from triptych.services.cli.child import ChildSpec
from triptych.services.cli.restart_policy import RestartRules
from triptych.services.cli.supervisor import Supervisor
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.runtime.run_dir import RunDir

# Runs a supervisor of two stubs, to be killed. argv: folder.
_DRIVER = """
import asyncio, os, sys
from pathlib import Path
folder, stub, support = sys.argv[1:]
sys.path.append(support)
from stub_children import stub_links
from triptych.services.cli.child import ChildSpec
from triptych.services.cli.patience import Limits
from triptych.services.cli.supervisor import Supervisor
names = ("a", "b")
specs = [ChildSpec(n, (sys.executable, "-c", stub, str(os.getpid()), folder, n, "run"))
         for n in names]
async def main():
    supervisor = Supervisor(specs, names, stub_links(Path(folder)), Limits())
    async def ready(): print(*supervisor.pids.values(), flush=True)
    await supervisor.run(asyncio.Event(), ready)
asyncio.run(main())
"""


def test_a_clean_stop_goes_in_order_and_exits_0(tmp_path: Path) -> None:
    assert supervise(tmp_path, {"t": "run", "s": "run", "e": "run"}) == 0
    assert stopped(tmp_path) == ["t", "s", "e"]


def test_a_stop_during_start_up_exits_0(tmp_path: Path) -> None:
    async def main() -> int:
        specs = [stub_spec(tmp_path, "a", "slow")]
        supervisor = Supervisor(specs, ("a",), stub_links(tmp_path), QUICK)
        stop = asyncio.Event()
        running = asyncio.create_task(supervisor.run(stop))
        await until((tmp_path / "a.beat").exists)
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
    limits = replace(QUICK, startup_timeout=3.0)
    with pytest.raises(StartupError, match=r"^a not ready after 3 s"):
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
        supervisor.replace_spec(
            ChildSpec("a", (*stub_spec(tmp_path, "a").command[:-2], "new", "run"))
        )
        os.kill(supervisor.pids["a"], signal.SIGKILL)
        await until((tmp_path / "new.ready").exists)
        stop.set()

    assert supervise(tmp_path, {"a": "run"}, replace) == 0


def test_a_crash_loop_can_end_the_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def kill(supervisor: Supervisor, _stop: asyncio.Event) -> None:
        os.kill(supervisor.pids["a"], signal.SIGKILL)

    rules = RestartRules(max_restarts=3, first_delay=0.01, longest_delay=30.0)
    limits = replace(QUICK, restarts=rules, exit_on_crash_loop=True)
    assert supervise(tmp_path, {"a": "brief", "b": "run"}, kill, limits) == 1
    assert stopped(tmp_path) == ["b"]
    assert [record.getMessage() for record in caplog.records] == [
        "a was killed by SIGKILL: starting it again",
        "a exited with code 3: told to: trying again in 0.01 s",
        "a exited with code 3: told to; that was end 3 in a row, a crash loop: "
        "trying again in 30 s",
    ]


def test_a_child_that_does_not_stop_is_killed(tmp_path: Path) -> None:
    begin = time.monotonic()
    limits = replace(QUICK, grace=1.0)
    assert supervise(tmp_path, {"a": "stubborn", "b": "run"}, limits=limits) == 0
    assert stopped(tmp_path) == ["b"]
    assert time.monotonic() - begin < WAIT / 2


def test_what_on_ready_raises_comes_out_after_the_children_are_gone(tmp_path: Path) -> None:
    async def fail(_supervisor: Supervisor, _stop: asyncio.Event) -> None:
        raise StartupError("no panel")

    with pytest.raises(StartupError, match="no panel"):
        supervise(tmp_path, {"a": "run"}, fail)
    assert stopped(tmp_path) == ["a"]


def test_no_orphans_after_kill_minus_nine_of_the_supervisor(tmp_path: Path) -> None:
    support = str(Path(__file__).parents[1] / "support")
    command = [sys.executable, "-c", _DRIVER, str(tmp_path), STUB, support]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == 2
        assert not any(gone(pid) for pid in pids)
        driver.kill()
    deadline = time.monotonic() + WAIT
    while not all(gone(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def serve(*flags: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "triptych.services.cli", "serve", *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


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
