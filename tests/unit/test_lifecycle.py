"""How a process ends, and how it goes with its parent."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from triptych.services.runtime.lifecycle import (
    StartupError,
    bind_to_parent,
    on_stop_signal,
    run_main,
)
from triptych.services.runtime.logging import LineFormatter

_WAIT = 30.0

# Each level starts the next, bound to it; the innermost prints its pid and sleeps.
_CHAIN = """
import os, subprocess, sys, time
from triptych.services.runtime.lifecycle import bind_to_parent
depth, parent = int(sys.argv[1]), sys.argv[2]
bind_to_parent(int(parent) if parent else None)
print(os.getpid(), flush=True)
if depth:
    subprocess.Popen(
        [sys.executable, "-c", os.environ["CHAIN"], str(depth - 1), str(os.getpid())],
        start_new_session=True,
    )
time.sleep(60)
"""


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + _WAIT
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        try:
            with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123  # may vanish at any time
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return  # dead; whoever adopted it has not reaped it yet
        except FileNotFoundError:
            return
        time.sleep(0.01)
    pytest.fail(f"process {pid} is still there")


def test_children_and_grandchildren_go_with_a_killed_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CHAIN", _CHAIN)
    command = [sys.executable, "-c", _CHAIN, "2", ""]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as root:
        assert root.stdout is not None
        pids = [int(root.stdout.readline()) for _ in range(3)]
        assert pids[0] == root.pid
        root.kill()
    for pid in pids[1:]:
        wait_until_gone(pid)


def test_a_child_whose_parent_is_already_gone_says_so() -> None:
    code = (
        "import sys; from triptych.services.runtime.lifecycle import *\n"
        "sys.exit(run_main('executor', lambda: bind_to_parent(2**22)))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith("triptych executor: error: parent process 4194304 has ended")
    assert ended.stderr.count("\n") == 1


def test_binding_needs_the_main_thread() -> None:
    raised: list[BaseException] = []

    def bind() -> None:
        try:
            bind_to_parent(os.getppid())
        except AssertionError as error:
            raised.append(error)

    thread = threading.Thread(target=bind)
    thread.start()
    thread.join()
    assert raised


def test_no_parent_means_no_bond() -> None:
    bind_to_parent(None)


def startup_error() -> int:
    raise StartupError("port: 80 is\n taken")


def bug() -> int:
    raise ValueError("oops")


def interrupted() -> int:
    raise KeyboardInterrupt


def test_run_main_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("x", lambda: None) == 0
    assert run_main("x", lambda: 7) == 7
    assert run_main("x", interrupted) == 130
    assert capsys.readouterr().err == ""
    assert run_main("x", startup_error) == 2
    assert capsys.readouterr().err == "triptych x: error: port: 80 is taken\n"
    assert run_main("x", bug) == 1
    assert "Traceback" in capsys.readouterr().err


def run_and_signal(code: str, *numbers: int) -> int:
    """Start code that prints a line when it is ready and after each signal; its exit code."""
    command = [sys.executable, "-u", "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for number in numbers:
            process.stdout.readline()
            process.send_signal(number)
        return process.wait(_WAIT)


_LOOP = """
import asyncio, sys
from triptych.services.runtime.lifecycle import on_stop_signal
async def main():
    stop = asyncio.Event()
    on_stop_signal(stop.set, asyncio.get_running_loop())
    print(); await stop.wait(); print()
    await asyncio.sleep(float(sys.argv[1]) if len(sys.argv) > 1 else 0)
asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_ends_cleanly(number: int) -> None:
    assert run_and_signal(_LOOP, number) == 0


def test_a_second_stop_signal_ends_at_once() -> None:
    code = _LOOP.replace("float(sys.argv[1]) if len(sys.argv) > 1 else 0", "60")
    assert run_and_signal(code, signal.SIGINT, signal.SIGINT) == 128 + signal.SIGINT


def test_the_callback_runs_once_on_the_loop() -> None:
    calls: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        on_stop_signal(lambda: calls.append(threading.get_ident()), loop)
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(_WAIT):
            while not calls:
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    asyncio.run(main())
    assert calls == [threading.get_ident()]


def test_a_log_line() -> None:
    facts = {"step": 3, "seconds": 0.25, "why": 'a "b"\nc'}
    record = logging.makeLogRecord(
        {"msg": "done %s\nnow", "args": ("x",), "levelname": "INFO", "created": 0.5, "msecs": 500.0}
        | facts
    )
    assert LineFormatter("scheduler").format(record) == (
        "1970-01-01T00:00:00.500Z INFO    scheduler done x\\nnow "
        'step=3 seconds=0.25 why="a \\"b\\"\\nc"'
    )
