"""Whose process `make chaos-peer` kills: our engine, and llama-cpp-python's server."""

import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests" / "support")]
from chaos_killer import stage_pids
from own_children import free_port
from peer_setup import PINNED

from engine import running_engine

_PATIENCE = 60.0


@dataclass(frozen=True, slots=True)
class Target:
    """OpenAI's HTTP at `url`; `pid` says who is to be killed, None while nobody is there."""

    url: str
    pid: Callable[[], int | None]


@contextlib.contextmanager
def ours(model: Path, stage: str) -> Iterator[Target]:
    """Our engine; the kill is for one of its stages."""
    port = free_port()
    flags = ("--http-port", str(port), "--restart-window", "0", "--max-restarts", "1000")
    with (
        tempfile.TemporaryDirectory(prefix="triptych-chaos-") as folder,
        running_engine(model, Path(folder) / "run", *flags) as engine,
    ):
        supervisor = engine.process.pid
        yield Target(f"http://127.0.0.1:{port}", lambda: stage_pids(supervisor).get(stage))


@contextlib.contextmanager
def peer(model: Path, python: Path) -> Iterator[Target]:
    """llama-cpp-python's server, in a loop that starts it again at once."""
    port = free_port()
    command = ["env",
        *(f"{name}={value}" for name, value in PINNED.items()),
        str(python), "-m", "llama_cpp.server", "--model", str(model), "--n_ctx", "2048",
               "--n_threads", "2", "--n_threads_batch", "2", "--host", "127.0.0.1",
               "--port", str(port),
               # else a new request ends the one that is being answered
               "--interrupt_requests", "false"]  # fmt: skip
    server = Restarted(command)
    try:
        target = Target(f"http://127.0.0.1:{port}", lambda: server.pid)
        _wait_for(target.url)
        yield target
    finally:
        server.stop()


class Restarted:
    """A process that is started again as soon as it has ended: the least of supervisors."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._stopped = threading.Event()
        self._process = self._start()
        self._loop = threading.Thread(target=self._run)
        self._loop.start()

    @property
    def pid(self) -> int:
        """Of the one that runs."""
        return self._process.pid

    def stop(self) -> None:
        """For good."""
        self._stopped.set()
        self._process.kill()
        self._loop.join()

    def _start(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def _run(self) -> None:
        while True:
            self._process.wait()
            if self._stopped.is_set():
                return
            self._process = self._start()
            if self._stopped.is_set():
                self._process.kill()


def _wait_for(url: str) -> None:
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/v1/models", trust_env=False).status_code == 200:
                return
        time.sleep(0.05)
    raise RuntimeError("llama_cpp.server does not answer")
