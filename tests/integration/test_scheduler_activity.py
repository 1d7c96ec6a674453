"""What the scheduler says of itself: idle, busy, stuck; and the end of one that hangs."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fake_executor import ExecutorProcess, continuation
from fake_tokenizer import FakeTokenizer
from scheduler_bench import MakeEngine
from scheduler_process import start_scheduler, stats_of, stopped
from triptych.services.runtime.lifecycle import EXIT_HUNG
from triptych.services.runtime.run_dir import RunDir
from triptych.v1 import stage_pb2

IDLE, BUSY, STUCK = (
    stage_pb2.ACTIVITY_IDLE,
    stage_pb2.ACTIVITY_BUSY,
    stage_pb2.ACTIVITY_STUCK,
)


def test_idle_busy_stuck_and_back(make_engine: MakeEngine) -> None:
    engine = make_engine(heartbeat_timeout=1.5)
    engine.executor(step_seconds=3.0)
    tokenizer = engine.tokenizer()
    tokenizer.until(lambda: tokenizer.beats and tokenizer.beats[-1].executor_ready)
    assert tokenizer.beats[-1].activity == IDLE
    assert (tokenizer.beats[-1].step_age_ms, tokenizer.beats[-1].progress_age_ms) == (0, 0)
    tokenizer.until(lambda: engine.loop.snapshot.serving)  # made after the beats
    tokenizer.beats.clear()
    slot = tokenizer.submit([1, 2], 2)
    tokenizer.until(lambda: tokenizer.ended(slot))
    tokenizer.until(lambda: tokenizer.beats[-1].activity == IDLE)
    assert tokenizer.tokens[slot] == continuation([1, 2], 2)
    changes = [beat.activity for beat in tokenizer.beats]
    changes = [each for at, each in enumerate(changes) if at == 0 or changes[at - 1] != each]
    while changes[0] == IDLE:
        changes.pop(0)
    assert changes == [BUSY, STUCK, BUSY, STUCK, IDLE]
    for beat in tokenizer.beats:
        if beat.progress_age_ms != 1500:  # rounded down, from either side of the bound
            assert (beat.activity == STUCK) == (beat.progress_age_ms > 1500)
        assert beat.executor_ready
        if beat.activity == IDLE:
            assert beat.step_age_ms == beat.progress_age_ms == 0


def test_without_an_executor_it_is_not_stuck(make_engine: MakeEngine) -> None:
    engine = make_engine(heartbeat_timeout=1.0)
    first = engine.executor(step_seconds=0.02)
    tokenizer = engine.tokenizer()
    slot = tokenizer.submit([1, 2], 60)
    tokenizer.until(lambda: len(tokenizer.tokens[slot]) > 2)
    first.kill()
    tokenizer.until(lambda: not tokenizer.executor_ready)
    tokenizer.until(lambda: tokenizer.beats[-1].progress_age_ms > 2000)
    assert tokenizer.beats[-1].activity == BUSY
    assert tokenizer.beats[-1].step_age_ms == 0
    assert not engine.loop.snapshot.serving
    tokenizer.beats.clear()
    engine.executor(step_seconds=0.02)
    tokenizer.until(lambda: tokenizer.ended(slot))
    assert tokenizer.tokens[slot] == continuation([1, 2], 60)
    assert all(beat.activity != STUCK for beat in tokenizer.beats)


@dataclass
class Running:
    """A scheduler process with a tokenizer that it has welcomed."""

    run_dir: RunDir
    scheduler: "Popen[str]"
    tokenizer: FakeTokenizer

    def serving(self) -> bool:
        with grpc.insecure_channel(f"unix:{self.run_dir.control_socket('scheduler')}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=30)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@contextmanager
def running(
    folder: Path, step_seconds: float, held_by: Path | str = "", **settings: object
) -> Iterator[Running]:
    scheduler = start_scheduler(folder / "run", python_path=folder, **settings)
    run_dir = RunDir.open(folder / "run")
    executor = ExecutorProcess(folder / "run", step_seconds=step_seconds, held_by=held_by)
    tokenizer = FakeTokenizer(run_dir)
    try:
        tokenizer.until(lambda: tokenizer.welcomes)
        yield Running(run_dir, scheduler, tokenizer)
    finally:
        stopped(scheduler)
        executor.kill()
        tokenizer.close()


def test_health_is_serving_only_while_tokens_can_be_made(tmp_path: Path) -> None:
    held = tmp_path / "held"
    with running(tmp_path, 0.0, held, heartbeat_timeout=3) as engine:
        tokenizer = engine.tokenizer
        tokenizer.until(engine.serving)
        assert stats_of(engine.run_dir).process.activity == IDLE
        held.touch()
        slot = tokenizer.submit([1, 2], 2)
        tokenizer.until(lambda: not engine.serving())
        process = stats_of(engine.run_dir).process
        assert process.activity == STUCK
        assert process.step_age_ms > 2500  # it began a moment after the request came
        assert process.progress_age_ms > 3000
        held.unlink()
        tokenizer.until(lambda: tokenizer.ended(slot) and engine.serving())
        assert stats_of(engine.run_dir).process.activity == IDLE


_PLUG_IN = """
import time

def make(argument):
    def process(prompt_ids, output_ids, row):
        time.sleep(float(argument) if len(output_ids) == 2 else 0)
    return process
"""


def install_sleeper(folder: Path) -> None:
    """A logits processor as any package brings one."""
    (folder / "sleeper_plug_in.py").write_text(_PLUG_IN)
    facts = folder / "sleeper-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: sleeper\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(
        "[triptych.logits_processors]\nsleeper = sleeper_plug_in:make\n"
    )


def test_a_loop_that_hangs_ends_the_process(tmp_path: Path) -> None:
    install_sleeper(tmp_path)
    settings: dict[str, Any] = {
        "heartbeat_timeout": 1,
        "step_timeout": 8,
        "logits_processors": "sleeper",
    }
    with running(tmp_path, 0.0, **settings) as engine:
        tokenizer = engine.tokenizer
        slot = tokenizer.submit([1, 2], 10, processors=(("sleeper", "1000"),))
        tokenizer.until(lambda: len(tokenizer.tokens[slot]) == 2)
        tokenizer.until(lambda: stats_of(engine.run_dir).process.activity == STUCK)
        assert not engine.serving()
        assert tokenizer.tokens[slot] == continuation([1, 2], 2)
        said = engine.scheduler.communicate(timeout=60)[1]
        assert engine.scheduler.returncode == EXIT_HUNG
        lines = [line for line in said.splitlines() if "has taken no turn for" in line]
        assert len(lines) == 1
        assert "Traceback" not in said
        words = (engine.run_dir.path / "scheduler.end").read_text()
        assert "has taken no turn for" in words


def test_a_loop_that_is_slow_but_not_too_slow_goes_on(tmp_path: Path) -> None:
    install_sleeper(tmp_path)
    settings: dict[str, Any] = {
        "heartbeat_timeout": 10,
        "step_timeout": 30,
        "logits_processors": "sleeper",
    }
    with running(tmp_path, 0.0, **settings) as engine:
        tokenizer = engine.tokenizer
        slot = tokenizer.submit([1, 2], 10, processors=(("sleeper", "1.5"),))
        tokenizer.until(lambda: tokenizer.ended(slot))
        assert tokenizer.tokens[slot] == continuation([1, 2], 10)


def test_a_process_that_stood_still_is_not_hung(tmp_path: Path) -> None:
    """Stopped for longer than step_timeout, as when a machine is suspended."""
    with running(tmp_path, 0.02, heartbeat_timeout=2, step_timeout=2) as engine:
        tokenizer = engine.tokenizer
        slot = tokenizer.submit([1, 2], 100)
        tokenizer.until(lambda: len(tokenizer.tokens[slot]) > 2)
        engine.scheduler.send_signal(signal.SIGSTOP)
        time.sleep(4.0)
        engine.scheduler.send_signal(signal.SIGCONT)
        tokenizer.until(lambda: tokenizer.ended(slot))
        assert tokenizer.tokens[slot] == continuation([1, 2], 100)
        os.kill(engine.scheduler.pid, 0)
        assert engine.scheduler.poll() is None
