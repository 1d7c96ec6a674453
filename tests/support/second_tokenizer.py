"""A tokenizer process beside the one that the supervisor of an engine keeps."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from engine import START_TIMEOUT, Engine, is_serving
from fault_asks import Door

NAME = "tokenizer-1"


@contextmanager
def second_tokenizer(engine: Engine, model: Path, *flags: str) -> Iterator[Door]:
    """It serves within, on ports of its own, and ends cleanly."""
    command = [
        sys.executable, "-m", "triptych.services.tokenizer", "--model", str(model), "--name", NAME,
        "--run-dir", str(engine.run_dir), "--port", "0", "--http-port", "0",
        "--tool-call-parser", "hermes", *flags,
    ]  # fmt: skip
    process = subprocess.Popen(command)
    try:
        door = _door(engine, process)
        try:
            yield door
        finally:
            door.close()
        process.terminate()
        code = process.wait(30)
        assert code == 0, f"{NAME} ended with {code}"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)


def _door(engine: Engine, process: "subprocess.Popen[bytes]") -> Door:
    limit = time.monotonic() + START_TIMEOUT
    while time.monotonic() < limit:
        assert process.poll() is None, "the second tokenizer has ended"
        try:
            stats = engine.stats(NAME).tokenizer
            if stats.http_address and is_serving(stats.address):
                return Door(stats.address, stats.http_address)
        except grpc.RpcError:
            pass  # not up yet
        time.sleep(0.02)
    raise AssertionError("the second tokenizer does not serve")
