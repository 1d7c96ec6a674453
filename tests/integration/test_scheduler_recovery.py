"""Stages that die beside a scheduler, at any step: who is told what, and who is not disturbed."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from fake_executor import DIE_TOKEN, ExecutorProcess, continuation
from fake_tokenizer import FakeTokenizer
from request_mixes import PROCESSORS
from resumed_mixes import VOCABULARY as HARMLESS
from resumed_mixes import Playing, mix, vocabulary
from scheduler_bench import Engine, MakeEngine
from scheduler_process import start_scheduler, stats_of, stopped
from triptych.engine_core.errors import FatalRequest
from triptych.services.runtime.run_dir import RunDir


@contextmanager
def supervised(engine: Engine, **options: object) -> Iterator[list[ExecutorProcess]]:
    """Executors, one after the other: a new one whenever one has ended."""
    started = [engine.executor(**options)]
    over = threading.Event()

    def keep() -> None:
        while not over.wait(0.01):
            if started[-1].ended:
                started.append(engine.executor(**options))

    keeper = threading.Thread(target=keep)
    keeper.start()
    try:
        yield started
    finally:
        over.set()
        keeper.join()


@pytest.mark.parametrize("seed", range(2))
def test_executors_killed_at_any_step(make_engine: MakeEngine, seed: int) -> None:
    """Requests of all kinds, and executors that are killed in the midst of them.

    Each brings a token at least: one killed again and again in the trial of the same choice would
    count as killed by it.
    """
    source = Random(seed)
    requests = mix(source, 9)
    engine = make_engine(processors=PROCESSORS)
    with supervised(engine, num_blocks=128, step_seconds=0.02) as executors:
        tokenizer = engine.tokenizer(vocabulary_size=HARMLESS)
        tokenizer.tell_vocabulary(vocabulary())
        undisturbed = Playing(tokenizer)
        undisturbed.whole(requests)
        expected = undisturbed.played()
        engine.until_idle()
        disturbed = Playing(tokenizer)
        disturbed.whole(requests)
        kills = 0
        while kills < 4 and not disturbed.over:
            play_on(disturbed, engine, steps=source.randrange(6))
            executors[-1].kill()
            kills += 1
            tokenizer.until(lambda: engine.stats.executors_lost_total == kills)  # noqa: B023  # called at once
            tokenizer.until(lambda: engine.stats.executor_ready)
        found = disturbed.played()
    for key, each in expected.items():
        assert found[key] == each, (requests[key[0]], key)
    assert kills > 1
    assert engine.stats.choices_fatal_total == 0
    engine.until_idle()


def play_on(playing: Playing, engine: Engine, steps: int) -> None:
    """Until a token has come, and so many more steps have ended; or all is over."""
    tokens = engine.stats.generated_tokens_total
    playing.tokenizer.until(lambda: playing.over or engine.stats.generated_tokens_total > tokens)
    enough = engine.stats.steps_total + steps
    playing.tokenizer.until(lambda: playing.over or engine.stats.steps_total >= enough)


@pytest.mark.parametrize("company", [0, 5])
def test_a_request_that_kills_executors_ends_alone(make_engine: MakeEngine, company: int) -> None:
    engine = make_engine()
    with supervised(engine, step_seconds=0.01, num_blocks=128) as executors:
        tokenizer = engine.tokenizer()
        others = {tokenizer.submit([n, 7], 100): n for n in range(company)}
        tokenizer.until(lambda: all(tokenizer.tokens[slot] for slot in others))
        deadly = tokenizer.submit([1, DIE_TOKEN, 2], 5)
        tokenizer.until(lambda: tokenizer.ended(deadly))
        assert isinstance(tokenizer.failed.pop(deadly), FatalRequest)
        assert len(executors) - 1 <= (3 if company else 2)
        tokenizer.until(lambda: tokenizer.ended(*others))
        late = tokenizer.submit([3], 5)
        tokenizer.until(lambda: tokenizer.ended(late))
    assert not tokenizer.failed
    engine.until_idle()
    for slot, n in others.items():
        assert tokenizer.tokens[slot] == continuation([n, 7], 100)
    stats = engine.stats
    assert stats.choices_fatal_total == 1
    assert stats.requests_finished_total == company + 2
    assert stats.executors_lost_total == (3 if company else 2)


def test_suspicion_outlives_a_change_of_the_pool(make_engine: MakeEngine) -> None:
    """Each new executor has another pool, so each has a core of its own."""
    engine = make_engine()
    engine.executor(step_seconds=0.02, num_blocks=64)
    tokenizer = engine.tokenizer()
    other = tokenizer.submit([7], 60)
    tokenizer.until(lambda: tokenizer.tokens[other])
    deadly = tokenizer.submit([DIE_TOKEN], 5)
    for lost in range(1, 4):
        tokenizer.until(lambda: engine.stats.executors_lost_total == lost)  # noqa: B023  # called at once
        engine.executor(step_seconds=0.02, num_blocks=64 + lost)
    tokenizer.until(lambda: tokenizer.ended(deadly, other))
    assert isinstance(tokenizer.failed[deadly], FatalRequest)
    assert tokenizer.tokens[other] == continuation([7], 60)
    assert engine.stats.executors_lost_total == 3
    engine.until_idle()


def test_a_tokenizer_that_dies_disturbs_no_other(make_engine: MakeEngine) -> None:
    """Found out by the next token or beat, not by silence."""
    engine = make_engine(heartbeat_interval=1.0, heartbeat_timeout=100.0)
    engine.executor(step_seconds=0.02)
    gone, stays = engine.tokenizer(), engine.tokenizer()
    for n in range(6):
        gone.submit([n], 200)
    slots = {stays.submit([n, 2], 60): n for n in range(6)}
    stays.until(lambda: all(stays.tokens[slot] for slot in list(slots)[:2]))
    gone.pump(0.1)
    gone.close()
    stays.until(lambda: engine.stats.requests_aborted_total == 6)
    stays.until(lambda: stays.ended(*slots))
    for slot, n in slots.items():
        assert stays.tokens[slot] == continuation([n, 2], 60)
    engine.until_idle()
    assert engine.stats.tokenizers_connected == 1


def test_a_new_executor_says_hello_before_the_end_of_the_old_one_was_seen(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    scheduler = start_scheduler(folder, heartbeat_timeout=20)
    first = ExecutorProcess(folder, step_seconds=0.02)
    tokenizer = FakeTokenizer(RunDir.open(folder))
    second: ExecutorProcess | None = None
    try:
        tokenizer.until(lambda: tokenizer.welcomes)
        slot = tokenizer.submit([1, 2], 60)
        tokenizer.until(lambda: len(tokenizer.tokens[slot]) > 3)
        scheduler.send_signal(signal.SIGSTOP)
        first.kill()
        second = ExecutorProcess(folder, step_seconds=0.02)
        time.sleep(3.0)  # it says hello several times
        scheduler.send_signal(signal.SIGCONT)
        tokenizer.until(lambda: tokenizer.ended(slot))
        assert tokenizer.tokens[slot] == continuation([1, 2], 60)
        assert not second.ended
    finally:
        said = stopped(scheduler)
        first.kill()
        if second is not None:
            second.kill()
        tokenizer.close()
    assert "refused" not in said


def test_what_the_dead_had_is_given_back(tmp_path: Path) -> None:
    """Descriptors and mapped rings of a scheduler that outlives executors and tokenizers."""
    folder = tmp_path / "run"
    scheduler = start_scheduler(folder, heartbeat_timeout=60)
    run_dir = RunDir.open(folder)
    stays = FakeTokenizer(run_dir)
    figures = []
    try:
        for _ in range(5):
            executor = ExecutorProcess(folder, step_seconds=0.01)
            gone = FakeTokenizer(run_dir)
            for each in (stays, gone):
                each.until(lambda: each.welcomes and stats_of(run_dir).scheduler.executor_ready)  # noqa: B023  # called at once
            for slot, each in [(each.submit([1, 2], 30), each) for each in (gone, stays)]:
                each.until(lambda: len(each.tokens[slot]) > 2)  # noqa: B023  # called at once
            gone.close()
            executor.kill()
            stays.until(lambda: not stats_of(run_dir).scheduler.executor_ready)
            stays.until(lambda: stats_of(run_dir).scheduler.tokenizers_connected == 1)
            process = stats_of(run_dir).process
            figures.append((process.open_files, process.ring_maps))
        # The connections over which we ask are among them, and closed there a moment later.
        stays.until(lambda: stats_of(run_dir).process.open_files <= figures[1][0])
    finally:
        said = stopped(scheduler)
        stays.close()
    assert "Traceback" not in said
    assert {maps for _, maps in figures} == {0}
