"""An engine whose executor draws tokens and is a step ahead: the emulated device, real processes.

Its answers are those of the CPU's reference plan, token by token, whatever else goes on.
"""

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from choices import joined, values
from engine import CONTROL_NAMES, Engine, alive, generate_request, running_engine, stop
from faults import compare, in_decode, killing, running_bench
from small_engines import tiny_model

pytestmark = pytest.mark.e2e

V = 320
BLOCKS = 20
BLOCK_BYTES = 4096
"""2 layers x 16 tokens x 2 heads x (keys and values of 8) x 4 bytes."""
FLAGS = (
    *("--kv-cache-memory", str(BLOCKS * BLOCK_BYTES), "--kv-cache-dtype", "float32"),
    *("--cpu-threads", "1", "--max-num-seqs", "8", "--max-num-batched-tokens", "48"),
)
SWAP = ("--swap-space", str(4 * BLOCKS * BLOCK_BYTES))
EMULATED = ("--device", "emulated", "--cudagraph-capture-sizes", "1,2,4,8")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=256)


@pytest.fixture(scope="module")
def emulated(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    run_dir = tmp_path_factory.mktemp("emulated") / "run"
    with running_engine(model, run_dir, *FLAGS, *EMULATED, *SWAP) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[dict[int, list[int]], dict[int, int], list[float | None]]]:
    run_dir = tmp_path_factory.mktemp("cpu") / "run"
    with running_engine(model, run_dir, *FLAGS, "--enforce-eager") as engine:
        return answers(engine, REQUESTS)


Said = tuple[dict[int, list[int]], dict[int, int], list[float | None]]
DEVICE_DRAWS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 4, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 1.1, "seed": 9, "top_k": 30, "frequency_penalty": 0.6, "logprobs": 3},
    {"temperature": 1.0, "seed": 5, "n": 3, "logprobs": 0},
)
HOST_DRAWS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.9, "seed": 6, "min_tokens": 9},
    {"temperature": 0.7, "seed": 7, "logit_bias": {5: 3.0, 6: -2.0}, "logprobs": 2},
    {"temperature": 0.0, "prompt_logprobs": 1},
)


def a_mix(count: int, seed: int) -> list[dict[str, Any]]:
    """Prompts that share beginnings; one request in twelve has tokens that the host draws: where
    it is more, no step is sent ahead."""
    rng = random.Random(seed)
    text = [rng.randrange(V) for _ in range(120)]
    return [
        {
            "prompt": [*text[: rng.randrange(1, 100)], rng.randrange(V)],
            "max_tokens": rng.randrange(2, 60),
            **(HOST_DRAWS[i // 12 % 3] if i % 12 == 5 else DEVICE_DRAWS[i % len(DEVICE_DRAWS)]),
        }
        for i in range(count)
    ]


REQUESTS = a_mix(36, 11)


def answers(engine: Engine, requests: Sequence[dict[str, Any]]) -> list[Said]:
    """Of each: tokens and end of every choice, and the logprobs of the first."""

    def one(wanted: dict[str, Any]) -> Said:
        request = generate_request(**wanted, add_special_tokens=False)
        got = joined(engine.stub.Generate(request, timeout=60))
        return dict(got.ids), got.finish, values(got.logprobs[0])

    with ThreadPoolExecutor(12) as pool:
        return list(pool.map(one, requests))


def leave(engine: Engine, count: int) -> None:
    """Requests of clients that go when they have read a little."""
    for k in range(count):
        stream = engine.stub.Generate(
            generate_request([7, 8, k], max_tokens=150, temperature=1.0, ignore_eos=True),
            timeout=60,
        )
        for _ in range(k % 4):
            next(stream)
        stream.cancel()


def test_its_answers_are_those_of_the_cpu(emulated: Engine, expected: list[Said]) -> None:
    """Under a load that shares prefixes, preempts, moves blocks to host memory and back, and is
    left by some."""
    executor = emulated.stats("executor-0").executor
    assert (executor.device, executor.plan, executor.dtype) == ("emulated", "cudagraph", "float32")
    assert (executor.num_blocks, executor.num_host_blocks) == (BLOCKS, 4 * BLOCKS)
    assert executor.num_graphs == 4
    for _ in range(4):  # a machine that is busy may not get many of them to run at once
        with ThreadPoolExecutor(1) as pool:
            left = pool.submit(leave, emulated, 12)
            got = answers(emulated, REQUESTS)
            left.result()
        for one, other in zip(expected, got, strict=True):
            assert one[:2] == other[:2]
            assert other[2] == pytest.approx(one[2], abs=1e-3)
        scheduler, executor = emulated.wait_idle(), emulated.stats("executor-0").executor
        if scheduler.preemptions_total > 0 and executor.blocks_loaded_total > 0:
            break
    assert scheduler.preemptions_total > 0
    assert executor.blocks_stored_total > 0
    assert executor.blocks_loaded_total > 0
    assert scheduler.prefix_hits_total > 0
    assert scheduler.steps_ahead_total > 0
    assert scheduler.device_tokens_total > scheduler.host_tokens_total > 0


def test_alone_and_together_are_the_same(emulated: Engine, expected: list[Said]) -> None:
    for request, one in list(zip(REQUESTS, expected, strict=True))[:8]:
        (got,) = answers(emulated, [request])
        assert got[:2] == one[:2]
    emulated.wait_idle()


def test_steps_are_sent_ahead(emulated: Engine) -> None:
    """While plain requests decode, which is what it is for."""
    before = emulated.stats("scheduler").scheduler
    emulated.generate([1, 2, 3], max_tokens=100, temperature=0.0, ignore_eos=True)
    after = emulated.wait_idle()
    steps = after.steps_total - before.steps_total
    assert after.steps_ahead_total - before.steps_ahead_total > steps // 2
    assert after.wasted_tokens_total - before.wasted_tokens_total <= 1


def test_processes_that_die_or_are_told_to_end(tmp_path: Path) -> None:
    """With steps ahead in flight: streams pause and go on, no token lost, doubled or changed, all
    that was lent comes back; at SIGTERM they finish, and nothing is left."""
    flags = (*EMULATED, "--heartbeat-interval", "0.2", "--shutdown-grace", "60")
    with running_bench(tmp_path, *flags) as bench:
        mix = bench.mixer.streams(6, tokens=40)
        for victim in ("executor-0", "scheduler"):
            bench.check(killing(victim, at=in_decode), mix)
        wanted, scene = bench.undisturbed(mix)
        pids = [bench.pid(name) for name in CONTROL_NAMES]
        with bench.sent(mix, scene.seen) as sent:
            scene.seen.wait(30)
            assert stop(bench.engine) == 0
            got = [each() for each in sent]
        assert compare(mix, wanted, got) == []
        assert not any(map(alive, pids))
