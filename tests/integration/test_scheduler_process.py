"""The scheduler as a process: one at a time in a run directory, ends clean on SIGTERM."""

import signal
import subprocess
import sys
from pathlib import Path

import grpc

from fake_executor import (
    ExecutorProcess,
    continuation,
)
from fake_tokenizer import FakeTokenizer
from triptych.services.runtime.run_dir import RunDir
from triptych.v1 import control_pb2, control_pb2_grpc


def start_scheduler(run_dir: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "triptych.services.scheduler", f"--run-dir={run_dir}"]
    return subprocess.Popen(
        [*command, "--heartbeat-interval=0.1", "--heartbeat-timeout=2"],
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_scheduler_process(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    scheduler = start_scheduler(folder)
    run_dir = RunDir.open(folder)
    executor = ExecutorProcess(folder)
    tokenizer = FakeTokenizer(run_dir)
    try:
        tokenizer.until(lambda: tokenizer.welcomes)
        second = start_scheduler(folder)
        _, said = second.communicate(timeout=30)
        assert second.returncode == 2
        assert said.startswith("triptych scheduler: error: another scheduler runs in")
        slot = tokenizer.submit([7, 8], 9)
        tokenizer.until(lambda: tokenizer.ended(slot))
        assert tokenizer.tokens[slot] == continuation([7, 8], 9)
        with grpc.insecure_channel(f"unix:{run_dir.control_socket('scheduler')}") as channel:
            stub = control_pb2_grpc.ControlServiceStub(channel)
            stats = stub.Stats(control_pb2.StatsRequest(), timeout=5)
        assert stats.process.ring_maps == 2
        assert stats.scheduler.generated_tokens_total == 9
        assert stats.scheduler.impl == "native"
    finally:
        scheduler.send_signal(signal.SIGTERM)
        _, said = scheduler.communicate(timeout=20)
        executor.kill()
        tokenizer.close()
    assert scheduler.returncode == 0, said
    assert "Traceback" not in said
