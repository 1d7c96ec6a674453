"""Executors that die, hang or outlive their scheduler: no token lost, doubled or changed."""

import os
from pathlib import Path

import pytest

from fake_executor import (
    continuation,
)
from scheduler_bench import Engine, MakeEngine
from triptych.engine_core.errors import TooLong


@pytest.mark.parametrize("num_blocks", [64, 40, 80])
def test_an_executor_killed_in_a_step(make_engine: MakeEngine, num_blocks: int) -> None:
    """Whatever the new one's pool: no token is lost, doubled or changed."""
    engine = make_engine()
    first = engine.executor(step_seconds=0.03)
    tokenizer = engine.tokenizer()
    prompts = [list(range(n, n + 5)) for n in range(10)]
    slots = [tokenizer.submit(prompt, 25) for prompt in prompts]
    tokenizer.until(lambda: all(len(tokenizer.tokens[slot]) > 2 for slot in slots[:8]))
    first.kill()
    tokenizer.until(lambda: not tokenizer.executor_ready)
    engine.until(lambda: not engine.loop.snapshot.serving)
    engine.executor(num_blocks=num_blocks)
    tokenizer.until(lambda: tokenizer.ended(*slots))
    for slot, prompt in zip(slots, prompts, strict=True):
        assert tokenizer.tokens[slot] == continuation(prompt, 25)
    engine.until_idle()
    assert engine.stats.blocks_total == num_blocks


def test_a_request_that_no_longer_fits_fails(make_engine: MakeEngine) -> None:
    engine = make_engine()
    first = engine.executor(step_seconds=0.03)
    tokenizer = engine.tokenizer()
    large, small = tokenizer.submit([1], 100), tokenizer.submit([2], 20)
    tokenizer.until(lambda: len(tokenizer.tokens[small]) > 2)
    first.kill()
    engine.executor(num_blocks=10)
    tokenizer.until(lambda: tokenizer.ended(large, small))
    assert isinstance(tokenizer.failed[large], TooLong)
    assert tokenizer.tokens[small] == continuation([2], 20)
    assert tokenizer.welcomes[-1].model.num_blocks == 10
    assert tokenizer.welcomes[-1].max_sequence_len < tokenizer.welcomes[0].max_sequence_len
    engine.until_idle()


def test_an_executor_that_hangs_is_lost_and_may_come_back(make_engine: MakeEngine) -> None:
    engine = make_engine(heartbeat_timeout=1.5)
    executor = engine.executor(step_seconds=0.05)
    tokenizer = engine.tokenizer()
    slot = tokenizer.submit([1, 2, 3], 60)
    tokenizer.until(lambda: len(tokenizer.tokens[slot]) > 2)
    executor.pause()
    tokenizer.until(lambda: not tokenizer.executor_ready)
    executor.resume()  # its late StepDone is nobody's any more
    tokenizer.until(lambda: tokenizer.ended(slot))
    assert tokenizer.tokens[slot] == continuation([1, 2, 3], 60)
    engine.until_idle()


def test_an_executor_waits_for_the_next_scheduler(make_engine: MakeEngine, tmp_path: Path) -> None:
    first = make_engine()
    executor = first.executor()
    first.tokenizer()
    first.stop()
    second = Engine(first.run_dir.path)
    try:
        tokenizer = second.tokenizer()
        slot = tokenizer.submit([4, 5], 6)
        tokenizer.until(lambda: tokenizer.ended(slot))
        assert tokenizer.tokens[slot] == continuation([4, 5], 6)
        os.kill(executor.pid, 0)
    finally:
        second.close()
