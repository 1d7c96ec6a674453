"""Requests that nobody waits for any more, and who counts as gone."""

import time
from pathlib import Path

import pytest

from fake_executor import (
    continuation,
)
from scheduler_bench import MakeEngine
from triptych.services.scheduler import loop


def test_an_abort_within_a_step(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    held = tmp_path / "held"
    engine.executor(held_by=held)
    tokenizer = engine.tokenizer()
    held.touch()
    gone, stays = tokenizer.submit([1, 2], 200), tokenizer.submit([3, 4], 2)
    tokenizer.until(lambda: engine.stats.requests_tracked == 2)
    tokenizer.until(lambda: engine.stats.slots_free < engine.stats.slots_total)
    tokenizer.abort(gone)
    # Taken in while the step runs, freed when it ends.
    engine.until(lambda: engine.stats.requests_aborted_total == 1)
    assert engine.stats.requests_tracked == 1
    assert engine.stats.slots_free < engine.stats.slots_total
    assert engine.stats.steps_total == 0
    held.unlink()
    tokenizer.until(lambda: tokenizer.ended(stays))
    assert tokenizer.tokens[stays] == continuation([3, 4], 2)
    assert not tokenizer.ended(gone)
    assert len(tokenizer.tokens[gone]) <= 1
    engine.until_idle()


def test_a_tokenizer_that_vanishes_gives_its_blocks_back(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.executor(step_seconds=0.02)
    gone, stays = engine.tokenizer(), engine.tokenizer()
    for n in range(5):
        gone.submit([n], 250)
    slot = stays.submit([1, 2], 60)
    gone.until(lambda: gone.messages > 2)
    gone.close()
    stays.until(lambda: engine.stats.requests_aborted_total == 5)
    stays.until(lambda: stays.ended(slot))
    assert stays.tokens[slot] == continuation([1, 2], 60)
    engine.until_idle()
    assert engine.stats.tokenizers_connected == 1


def test_a_silent_tokenizer_is_forgotten_and_told_so(make_engine: MakeEngine) -> None:
    engine = make_engine(heartbeat_timeout=1.5)
    engine.executor(step_seconds=0.05)
    tokenizer = engine.tokenizer()
    slot = tokenizer.submit([1], 250)
    engine.until(lambda: engine.stats.tokenizers_connected == 0)  # no beats, for that long
    engine.until_idle()
    tokenizer.until(lambda: tokenizer.told_to_start_again)
    assert not tokenizer.ended(slot)
    tokenizer.say_hello()
    tokenizer.until(lambda: tokenizer.welcomes)
    again = tokenizer.submit([1], 3)
    tokenizer.until(lambda: tokenizer.ended(again))


def test_a_stall_of_the_scheduler_is_not_the_silence_of_others(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    engine.executor(step_seconds=0.02)
    tokenizer = engine.tokenizer()
    slot = tokenizer.submit([1], 60)
    tokenizer.until(lambda: len(tokenizer.tokens[slot]) > 3)
    monkeypatch.setattr(loop, "_now", lambda: time.perf_counter() + 100)
    tokenizer.until(lambda: tokenizer.ended(slot))
    assert tokenizer.tokens[slot] == continuation([1], 60)
    assert not tokenizer.told_to_start_again
    assert engine.stats.tokenizers_connected == 1
    assert engine.stats.executor_ready
