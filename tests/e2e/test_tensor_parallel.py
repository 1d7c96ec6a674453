"""Two executors that compute every step together: the same tokens as one, and one to an operator.

On the emulated device, where ranks sum with gloo.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest

from engine import Engine, alive, running_engine, stop, wait_until_serving
from small_engines import tiny_model
from triptych.services.runtime.lifecycle import EXIT_GROUP
from triptych.v1 import control_pb2

CONTEXT = 384
RANKS = ("executor-0", "executor-1")
STEPS = ("--max-num-seqs", "6", "--max-num-batched-tokens", "48")
FLAGS = (
    *STEPS, "--device", "emulated", "--kv-cache-memory", "4MiB", "--cpu-threads", "1",
    "--cudagraph-capture-sizes", "2,6",
)  # fmt: skip
_READY = control_pb2.StageState.STATE_READY


def prompts() -> list[tuple[list[int], dict[str, Any]]]:
    """Greedy and seeded ones; some are computed in several steps."""
    source = Random(5)
    asks = []
    for index, size in enumerate((1, 7, 30, 49, 140, 300, 12, 90)):
        drawn: dict[str, Any] = {"temperature": 0.0}
        if index % 2:
            drawn = {"temperature": 1.0, "seed": index, "top_p": 0.95, "repetition_penalty": 1.1}
        prompt = [source.randrange(256) for _ in range(size)]
        asks.append((prompt, {"max_tokens": 24, "ignore_eos": True, **drawn}))
    return asks


def answers(engine: Engine) -> list[list[int]]:
    """To all at once: more than run together."""
    with ThreadPoolExecutor(16) as pool:
        sent = [
            pool.submit(engine.generate, prompt, **params, timeout=120)
            for prompt, params in prompts()
        ]
        return [each.result().token_ids for each in sent]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(
        tmp_path_factory.mktemp("model"),
        max_position_embeddings=CONTEXT,
        hidden_size=64,
        num_attention_heads=8,
    )


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """What one executor answers."""
    with running_engine(model, model.parent / "one", *FLAGS) as engine:
        return answers(engine)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    folder = model.parent / "two"
    with running_engine(model, folder, *FLAGS, "--tensor-parallel-size", "2") as engine:
        yield engine
    left = {path.suffix for path in folder.iterdir()}
    assert left == {".lock", ".log"}


def test_the_same_tokens_as_one_rank(engine: Engine, expected: list[list[int]]) -> None:
    assert answers(engine) == expected
    engine.wait_idle()


def test_and_however_they_run_together(engine: Engine, expected: list[list[int]]) -> None:
    for (prompt, params), tokens in zip(prompts()[2:5], expected[2:5], strict=True):
        assert engine.generate(prompt, **params).token_ids == tokens


def test_four_ranks_that_share_key_value_heads(model: Path, expected: list[list[int]]) -> None:
    folder = model.parent / "four"
    with running_engine(model, folder, *FLAGS, "--tensor-parallel-size", "4") as engine:
        sent = list(zip(prompts(), expected, strict=True))[1:5]
        for (prompt, params), tokens in sent:
            assert engine.generate(prompt, **params).token_ids == tokens


def test_blocks_in_host_memory(model: Path, expected: list[list[int]]) -> None:
    """Each rank keeps its part of a block that the device has no room for."""
    tight = (*FLAGS, "--kv-cache-memory", "56KiB", "--swap-space", "1MiB")
    with running_engine(
        model, model.parent / "tight", *tight, "--tensor-parallel-size", "2"
    ) as engine:
        for _ in range(2):
            assert answers(engine) == expected
        engine.wait_idle()
        stats = when_alike(engine, "num_host_blocks", "blocks_stored_total", "blocks_loaded_total")
        assert stats.num_host_blocks > 0
        assert stats.blocks_stored_total > 0
        assert stats.blocks_loaded_total > 0


def when_alike(engine: Engine, *names: str) -> control_pb2.ExecutorStats:
    """Rank 0's, as soon as these numbers are the other's too: it may count a moment later."""
    found: list[control_pb2.ExecutorStats] = []

    def alike() -> bool:
        found[:] = [engine.stats(name).executor for name in RANKS]
        return all(getattr(found[0], name) == getattr(found[1], name) for name in names)

    until(alike)
    return found[0]


def test_each_rank_is_a_process_of_its_own(engine: Engine) -> None:
    assert engine.names == ["scheduler", *RANKS, "tokenizer-0"]
    stats = [engine.stats(name).executor for name in RANKS]
    assert [each.rank for each in stats] == [0, 1]
    assert [each.tensor_parallel_size for each in stats] == [2, 2]
    assert stats[0].num_blocks == stats[1].num_blocks
    assert when_alike(engine, "steps_total").steps_total > 0
    assert stats[0].weight_bytes < 0.6 * 4 * stats[0].parameters
    status = triptych("control", "status", "--run-dir", str(engine.run_dir))
    assert [line.split()[0] for line in status.splitlines()] == engine.names
    health = triptych("health", "--run-dir", str(engine.run_dir))
    assert {*RANKS} <= {line.split()[0] for line in health.splitlines()}


def triptych(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "triptych.services.cli", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


def test_restart_under_load_renews_all_and_changes_no_token(
    engine: Engine, expected: list[list[int]]
) -> None:
    before = {name: engine.stage(name) for name in RANKS}
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(answers, engine)
        until(lambda: engine.stats("scheduler").scheduler.generated_tokens_total > 0)
        done = engine.restart_executor()
        assert sent.result() == expected
    assert done.pid == engine.pid("executor-0")
    for name in RANKS:
        stage = engine.stage(name)
        assert (stage.state, stage.reason) == (_READY, "")
        assert stage.pid != before[name].pid
        assert stage.restarts_total == before[name].restarts_total + 1
    engine.wait_idle()


def test_unload_ends_all_and_load_begins_all(engine: Engine, expected: list[list[int]]) -> None:
    pids = [engine.pid(name) for name in RANKS]
    assert engine.unload_model() > 0
    assert not any(alive(pid) for pid in pids)
    states = {engine.stage(name).reason for name in RANKS}
    assert states == {"the model is unloaded (LoadModel loads it)"}
    engine.load_model()
    assert answers(engine) == expected


@pytest.mark.parametrize("victim", RANKS)
def test_a_killed_rank_takes_the_other_along_and_no_token(
    engine: Engine, expected: list[list[int]], victim: str
) -> None:
    (other,) = {*RANKS} - {victim}
    before = {name: engine.stage(name).restarts_total for name in RANKS}
    produced = engine.stats("scheduler").scheduler.generated_tokens_total
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(answers, engine)
        until(lambda: engine.stats("scheduler").scheduler.generated_tokens_total > produced + 20)
        os.kill(engine.pid(victim), signal.SIGKILL)
        assert sent.result() == expected

    def is_back(name: str) -> bool:
        stage = engine.stage(name)
        return stage.state == _READY and stage.restarts_total == before[name] + 1

    until(lambda: all(map(is_back, RANKS)))
    assert engine.stage(victim).last_end == "was killed by SIGKILL"
    last = engine.stage(other).last_end
    assert last == f"exited with code 71: rank {victim[-1]} is gone: ending"
    engine.wait_idle()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_stop_under_load_is_no_death(model: Path, expected: list[list[int]]) -> None:
    """Streams end well, and no rank takes the other's end for a crash."""
    folder = model.parent / "stopped"
    flags = (*FLAGS, "--tensor-parallel-size", "2", "--shutdown-grace", "60")
    two = running_engine(model, folder, *flags)
    with two as engine, ThreadPoolExecutor(1) as pool:
        sent = pool.submit(answers, engine)
        # All of them: one that came after the signal would be refused.
        count = len(prompts())
        until(lambda: engine.stats("tokenizer-0").tokenizer.requests_total == count)
        assert stop(engine) == 0
        assert sent.result() == expected
    log = engine.log.read_text()
    for words in (": ending", "Traceback", "exited with code", "ERROR", "CRITICAL"):
        assert words not in log, log
    assert {path.suffix for path in folder.iterdir()} == {".lock", ".log"}


def test_started_one_by_one_in_any_order(
    model: Path, tmp_path: Path, expected: list[list[int]]
) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    ranks = [("executor", *FLAGS, "--tensor-parallel-size=2", f"--rank={n}") for n in (1, 0)]
    tokenizer, scheduler = ("tokenizer", "--port=0", "--no-http"), ("scheduler", *STEPS)
    commands = [ranks[0], tokenizer, scheduler, ranks[1]]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for name, *flags in commands:
            model_flag = () if name == "scheduler" else (f"--model={model}",)
            command = [sys.executable, "-m", "triptych.services.cli", name, *model_flag, *flags]
            with (folder / f"{len(running)}.log").open("wb") as log:
                running.append(subprocess.Popen([*command, f"--run-dir={folder}"], stderr=log))
        engine = Engine(folder, running[1], folder / "1.log")
        wait_until_serving(engine)
        prompt, params = prompts()[3]
        assert engine.generate(prompt, **params).token_ids == expected[3]
        engine.close()
        running[0].send_signal(signal.SIGTERM)  # rank 1 alone
        assert running[0].wait(30) == 0
        assert running[3].wait(30) == EXIT_GROUP
        assert "rank 1 has stopped: ending" in (folder / "3.log").read_text()
    finally:
        for process in running:
            process.kill()
            process.wait(30)


def test_what_cannot_be_is_said_in_one_line(model: Path, tmp_path: Path) -> None:
    for flags, reason in (
        (("--tensor-parallel-size", "2"), "tensor_parallel_size: 2 ranks need --device cuda (or"),
        (("--tensor-parallel-size", "2", "--rank", "1", "--device", "emulated"), "rank: 1 is a"),
        (("--tensor-parallel-size", "5", "--device", "emulated"), "tensor_parallel_size"),
    ):
        done = subprocess.run(
            [
                sys.executable, "-m", "triptych.services.cli", "serve", f"--model={model}",
                f"--run-dir={tmp_path / 'run'}", "--port=0", "--no-http", *flags,
            ],
            stderr=subprocess.PIPE,
            text=True,
            timeout=90,
            check=False,
        )  # fmt: skip
        errors = [line for line in done.stderr.splitlines() if ": error: " in line]
        assert done.returncode == 2
        assert any(reason in line for line in errors), done.stderr
