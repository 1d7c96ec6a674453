"""The scheduler as a process: one at a time in a run directory, ends clean on SIGTERM."""

import signal
from pathlib import Path

from fake_executor import (
    ExecutorProcess,
    continuation,
)
from fake_tokenizer import FakeTokenizer
from scheduler_process import start_scheduler, stats_of
from triptych.services.runtime.run_dir import RunDir


def test_the_scheduler_process(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    scheduler = start_scheduler(folder)
    run_dir = RunDir.open(folder)
    executor = ExecutorProcess(folder)
    tokenizer = FakeTokenizer(run_dir)
    try:
        tokenizer.until(lambda: tokenizer.welcomes)
        second = start_scheduler(folder)
        _, said = second.communicate(timeout=60)
        assert second.returncode == 2
        assert said.startswith("triptych scheduler: error: another scheduler runs in")
        slot = tokenizer.submit([7, 8], 9)
        tokenizer.until(lambda: tokenizer.ended(slot))
        assert tokenizer.tokens[slot] == continuation([7, 8], 9)
        stats = stats_of(run_dir)
        assert stats.process.ring_maps == 2
        assert stats.scheduler.generated_tokens_total == 9
        assert stats.scheduler.impl == "native"
    finally:
        scheduler.send_signal(signal.SIGTERM)
        _, said = scheduler.communicate(timeout=60)
        executor.kill()
        tokenizer.close()
    assert scheduler.returncode == 0, said
    assert "Traceback" not in said
