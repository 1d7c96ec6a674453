"""The processes that bench-frontend measures, started and ready."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc

from triptych.v1 import control_pb2, control_pb2_grpc

HERE = Path(__file__).parent
START_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Server:
    """A process that streams. `address` for each kind; `streams`: how many it works for."""

    pid: int
    address: Mapping[str, str]
    streams: Callable[[], int]


@contextlib.contextmanager
def running(
    script: str, *arguments: str, python: str = sys.executable
) -> Iterator["subprocess.Popen[bytes]"]:
    """A Python process of a file of this folder, or a module; ended with the context."""
    target = [str(HERE / script)] if script.endswith(".py") else ["-m", script]
    process = subprocess.Popen([python, "-P", *target, *arguments], stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def until(condition: Callable[[], bool], what: str) -> None:
    """Raises RuntimeError when it does not come true."""
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {START_SECONDS:g} s: {what}")
        time.sleep(0.02)


@contextlib.contextmanager
def tokenizer(model: Path, run_dir: Path, name: str) -> Iterator[Server]:
    """A tokenizer process that is ready."""
    flags = ("--port", "0", "--http-port", "0", "--log-level", "error")
    control = run_dir / f"{name}.control.sock"
    with (
        running(
            "triptych.services.tokenizer", "--model", str(model), "--name", name,
            "--run-dir", str(run_dir), *flags,
        ) as process,
        grpc.insecure_channel(f"unix:{control}") as channel,
    ):  # fmt: skip
        until(control.exists, f"{name} has started")
        stub = control_pb2_grpc.ControlServiceStub(channel)

        def stats() -> control_pb2.TokenizerStats:
            return stub.Stats(control_pb2.StatsRequest(), timeout=10, wait_for_ready=True).tokenizer

        until(lambda: stats().scheduler_connected and bool(stats().http_address), f"{name} is up")
        address, http = stats().address, stats().http_address
        addresses = {"grpc": address, "session": address, "sse": http}
        yield Server(process.pid, addresses, lambda: stats().streams)


@contextlib.contextmanager
def llama_server(python: Path) -> Iterator[Server]:
    """llama-cpp-python's server before a model that takes no time."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    with running("lanes/instant_llama_server.py", str(port), python=str(python)) as process:
        until(lambda: _listens(port), "the peer listens")
        yield Server(process.pid, {"sse": f"127.0.0.1:{port}"}, lambda: 0)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
