"""The executor process around its worker: signals while it loads, and steps that never end."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from small_engines import SMALL, tiny_model
from triptych.services.runtime.last_words import take_words
from triptych.services.runtime.lifecycle import EXIT_HUNG
from triptych.services.runtime.run_dir import RunDir

_WAIT = 60.0

# Patched before it runs: loading that never ends.
_LOADS_FOR_EVER = """
import sys, threading
from triptych.services.executor import __main__ as executor
def load(*_arguments):
    print("loading", flush=True)
    threading.Event().wait()
executor.open_backend = load
sys.exit(executor.main(sys.argv[1:]))
"""

# A first step that never ends begins as soon as the model is there.
_HANGS = """
import sys, threading, time
from triptych.services.executor import __main__ as executor
class Worker(executor.Worker):
    def run(self, *_arguments):
        self._counters.watch.step_began(time.monotonic())
        threading.Event().wait()
executor.Worker = Worker
sys.exit(executor.main(sys.argv[1:]))
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir.open(tmp_path / "run")


def start(script: str, run_dir: RunDir, *flags: str) -> "subprocess.Popen[str]":
    model = str(tiny_model(run_dir.path.parent))
    own = ("--model", model, "--run-dir", str(run_dir.path), *SMALL[:4], *flags)
    return subprocess.Popen(
        [sys.executable, "-c", script, *own],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_signal_while_it_loads_ends_it_at_once(run_dir: RunDir) -> None:
    with start(_LOADS_FOR_EVER, run_dir) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        deadline = time.monotonic() + _WAIT
        while not run_dir.control_socket("executor-0").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=_WAIT)
    assert process.returncode == 0
    assert "the step in flight" not in said
    assert not run_dir.control_socket("executor-0").exists()


def test_a_step_that_never_ends_ends_the_process(run_dir: RunDir) -> None:
    with start(_HANGS, run_dir, "--step-timeout", "0.5") as process:
        _, said = process.communicate(timeout=_WAIT)
    assert process.returncode == EXIT_HUNG
    assert said.count("longer than step_timeout: hung") == 1
    assert take_words(run_dir, "executor-0").endswith("longer than step_timeout: hung")
