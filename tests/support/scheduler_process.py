"""The scheduler as a process of its own, with fakes beside it."""

import signal
import subprocess
import sys
from pathlib import Path

import grpc

from triptych.services.runtime.run_dir import RunDir
from triptych.v1 import control_pb2, control_pb2_grpc

_WITH_PATH = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from triptych.services.scheduler.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def start_scheduler(
    run_dir: Path, *, python_path: Path | None = None, **settings: object
) -> "subprocess.Popen[str]":
    """Its settings by name. `python_path`: a folder in which it finds more to import."""
    values: dict[str, object] = {"heartbeat_interval": 0.1, "heartbeat_timeout": 30, **settings}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    program = ["-m", "triptych.services.scheduler"]
    if python_path is not None:
        program = ["-c", _WITH_PATH, str(python_path)]
    return subprocess.Popen(
        [sys.executable, *program, f"--run-dir={run_dir}", *flags],
        stderr=subprocess.PIPE,
        text=True,
    )


def stopped(scheduler: "subprocess.Popen[str]") -> str:
    """End it; what it said on stderr."""
    if scheduler.poll() is None:
        scheduler.send_signal(signal.SIGCONT)
        scheduler.send_signal(signal.SIGTERM)
    try:
        return scheduler.communicate(timeout=60)[1]
    except subprocess.TimeoutExpired:
        scheduler.kill()
        return scheduler.communicate(timeout=60)[1]


def stats_of(run_dir: RunDir, name: str = "scheduler") -> control_pb2.StatsResponse:
    """What its control endpoint says."""
    with grpc.insecure_channel(f"unix:{run_dir.control_socket(name)}") as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        return stub.Stats(control_pb2.StatsRequest(), timeout=30)
