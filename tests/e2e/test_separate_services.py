"""The services started one by one, as compose.yaml does it: its commands, its health checks."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import deploy_files
from free_port import free_ports
from small_engines import SMALL, tiny_model
from source_tree import REPO
from triptych.client.api import Client, SamplingParams

pytestmark = pytest.mark.e2e
PROBE = REPO / "deploy" / "probe.py"
MORE = {"scheduler": (), "executor": SMALL, "tokenizer": ("--no-http", "--host", "127.0.0.1")}


@contextmanager
def service(
    name: str, run_dir: Path, model: Path, *flags: str
) -> Iterator["subprocess.Popen[bytes]"]:
    """A process with the command that compose.yaml gives it."""
    command = [
        f"{part.partition('/models/')[0]}{model}" if "/models/" in part else part
        for part in deploy_files.compose()["services"][name]["command"]
    ]
    process = subprocess.Popen(
        [
            sys.executable, "-m", "triptych.services.cli", *command, *MORE[name], *flags,
            "--run-dir", str(run_dir), "--log-level", "warning",
        ]
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)


def probe(*arguments: str) -> bool:
    done = subprocess.run([sys.executable, str(PROBE), *arguments], timeout=30, check=False)
    return done.returncode == 0


def wait_for(*arguments: str) -> None:
    deadline = time.monotonic() + 60
    while not probe(*arguments):
        assert time.monotonic() < deadline, arguments


def test_the_services_of_compose_and_a_second_tokenizer(tmp_path: Path) -> None:
    model, run_dir, ports = tiny_model(tmp_path), tmp_path / "run", [*map(str, free_ports(2))]
    sockets = [f"unix:{run_dir}/{name}.control.sock" for name in ("scheduler", "executor-0")]
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(service(name, run_dir, model))
            for name in ("scheduler", "executor")
        }
        first, second = [
            stack.enter_context(service("tokenizer", run_dir, model, "--port", port))
            for port in ports
        ]
        for target in sockets:
            wait_for(target)
        answers = []
        for port in ports:
            wait_for(f"127.0.0.1:{port}", "triptych.v1.InferenceService")
            with Client(f"127.0.0.1:{port}") as client:
                params = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)
                answers.append(client.generate("x", params).answer().token_ids)
        assert len(answers[0]) == 8
        assert answers[0] == answers[1]
        names = {path.name for path in run_dir.glob("tokenizer-*.control.sock")}
        assert names == {"tokenizer-0.control.sock", "tokenizer-1.control.sock"}

        # A stage that is down: alive, and not serving.
        started["executor"].send_signal(signal.SIGTERM)
        assert started["executor"].wait(30) == 0
        deadline = time.monotonic() + 30
        while probe(sockets[0]):
            assert time.monotonic() < deadline
        assert probe("--alive", sockets[0])
        assert probe("--alive", f"127.0.0.1:{ports[0]}")
        assert not probe("--alive", sockets[1])

        for process in (first, second, started["scheduler"]):
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
