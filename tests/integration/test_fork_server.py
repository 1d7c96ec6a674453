"""Children that are forked from a server: whose they are, and what is when there is no server."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from stub_children import gone
from triptych.services.cli import fork_server
from triptych.services.cli.child import ChildSpec
from triptych.services.cli.fork_server import ForkServer
from triptych.services.runtime.lifecycle import EXIT_FAILED

_WAIT = 30.0

# argv: run directory. Forks a scheduler, prints its pid and the server's, waits to be killed.
_DRIVER = """
import os, sys, time
from triptych.services.cli.child import ChildSpec
from triptych.services.cli.fork_server import ForkServer
server = ForkServer()
server.replace()
command = (sys.executable, "-m", "triptych.services.scheduler", "--run-dir", sys.argv[1],
           "--parent-pid", str(os.getpid()))
while (pid := server.fork(ChildSpec("scheduler", command))) is None:
    time.sleep(0.02)
print(pid, server.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def server() -> Iterator[ForkServer]:
    server = ForkServer()
    server.replace()
    yield server
    server.close()


def forked(server: ForkServer, spec: ChildSpec) -> int:
    deadline = time.monotonic() + _WAIT
    while (pid := server.fork(spec)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return pid


def scheduler(run_dir: Path, *flags: str) -> ChildSpec:
    own = ("--run-dir", str(run_dir), "--parent-pid", str(os.getpid()))
    command = (sys.executable, "-m", "triptych.services.scheduler", *own, *flags)
    return ChildSpec("scheduler", command)


def code_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_child_is_ours_and_does_what_its_command_says(server: ForkServer, tmp_path: Path) -> None:
    pid = forked(server, scheduler(tmp_path / "run"))
    deadline = time.monotonic() + _WAIT
    while not (tmp_path / "run" / "scheduler.control.sock").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process = psutil.Process(pid)
    assert process.ppid() == os.getpid()
    assert process.name() == "scheduler"
    assert os.getsid(pid) == pid
    os.kill(pid, signal.SIGTERM)
    assert code_of(pid) == 0


def test_its_exit_code_is_that_of_the_program(server: ForkServer, tmp_path: Path) -> None:
    assert code_of(forked(server, scheduler(tmp_path / "run", "--num-slots", "-1"))) == 2


def test_orphans_are_adopted_only_while_a_child_is_made(server: ForkServer, tmp_path: Path) -> None:
    assert code_of(forked(server, scheduler(tmp_path, "--num-slots", "-1"))) == 2
    script = "sleep 60 >/dev/null 2>&1 & echo $!"
    orphan = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    pid = int(orphan.stdout)
    assert psutil.Process(pid).ppid() != os.getpid()
    os.kill(pid, signal.SIGKILL)


def test_a_server_that_was_killed_is_replaced(
    server: ForkServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = scheduler(tmp_path / "run", "--num-slots", "-1")
    assert code_of(forked(server, spec)) == 2
    before = server.pid
    os.kill(before, signal.SIGKILL)
    with caplog.at_level(logging.WARNING):
        assert server.fork(spec) is None
    assert "starting another" in caplog.text
    assert gone(before)
    assert code_of(forked(server, spec)) == 2
    assert server.pid != before


def test_a_child_of_which_nobody_learned_does_not_begin(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer came too late, say: another process is started in its place."""
    answers: list[bytes] = []

    def too_late(answer: bytes) -> int:
        answers.append(answer)
        raise TimeoutError

    spec = scheduler(tmp_path / "run")
    assert code_of(forked(server, scheduler(tmp_path / "run", "--num-slots", "-1"))) == 2
    monkeypatch.setattr(fork_server, "_ANSWER_SECONDS", 60.0)  # however busy the machine is
    monkeypatch.setattr(fork_server, "_pid_in", too_late)
    assert server.fork(spec) is None
    (answer,) = answers
    assert code_of(int(answer)) == EXIT_FAILED
    assert not (tmp_path / "run" / "scheduler.lock").exists()


def test_children_and_server_go_with_whom_they_serve(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _DRIVER, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == 2
        time.sleep(0.5)  # they bind themselves a moment later
        assert not any(gone(pid) for pid in pids)
        driver.kill()
    deadline = time.monotonic() + _WAIT
    while not all(gone(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)
