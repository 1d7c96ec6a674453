"""Prefix cache, preemption, cancellation and company over gRPC: faults R23 to R66 as reported.

The same entries in one process, with more of everything: tests/integration/test_*_faults.py.
"""

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from choices import Choices, joined, values
from engine import Engine, generate_request, running_engine
from grpc_errors import as_error
from leaving import until
from scripted_models import write_s1_markov
from small_engines import SMALL, tiny_model
from triptych.v1 import control_pb2, control_pb2_grpc

pytestmark = pytest.mark.e2e

V = 320
EDGES = [15, 16, 17, 31, 32, 33]
BLOCK_BYTES = 3072
"""2 layers x 16 tokens x 2 heads x (k of 8, v in lanes of 16) x 2 bytes."""
FEW_SEQUENCES = ("--max-num-batched-tokens", "64", "--max-num-seqs", "16")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("m2"), max_position_embeddings=256)


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    run_dir = tmp_path_factory.mktemp("cache") / "run"
    with running_engine(model, run_dir, *SMALL, *FEW_SEQUENCES) as engine:
        yield engine
        engine.wait_idle()


@pytest.fixture(scope="module")
def small_pool(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """15 blocks: about three sequences of 80 tokens."""
    run_dir = tmp_path_factory.mktemp("pool") / "run"
    flags = ("--kv-cache-memory", str(15 * BLOCK_BYTES), "--cpu-threads", "1", *FEW_SEQUENCES)
    with running_engine(model, run_dir, *flags) as engine:
        assert engine.wait_idle().blocks_total == 15
        yield engine
        engine.wait_idle()


@pytest.fixture(scope="module")
def uncached(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The reference: no cache, one sequence at a time, by the Python twins."""
    run_dir = tmp_path_factory.mktemp("uncached") / "run"
    flags = (*SMALL, "--no-enable-prefix-caching", "--max-num-seqs", "1", "--engine-impl", "python")
    with running_engine(model, run_dir, *flags) as engine:
        yield engine
        assert engine.wait_idle().prefix_hits_total == 0


def text(seed: int, length: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(256) for _ in range(length)]


def run(engine: Engine, prompt: list[int], **params: Any) -> Choices:
    wanted: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "temperature": 0.0} | params
    return joined(engine.stub.Generate(generate_request(prompt, **wanted), timeout=120))


def cached(answer: Choices) -> int:
    assert answer.usage is not None
    return answer.usage.cached_tokens


def told(answer: Choices) -> tuple[object, ...]:
    """All that must not depend on cache and company."""
    assert answer.usage is not None
    rows = {
        index: [
            (row.token_id, row.logprob, row.rank, [t.logprob for t in row.top]) for row in found
        ]
        for index, found in answer.logprobs.items()
    }
    prompt = values(answer.prompt_logprobs)
    usage = answer.usage.prompt_tokens, answer.usage.completion_tokens
    return dict(answer.text), dict(answer.ids), rows, prompt, answer.finish, answer.score, usage


def flush(engine: Engine) -> int:
    with grpc.insecure_channel(f"unix:{engine.run_dir / 'scheduler.control.sock'}") as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        return int(stub.FlushCache(control_pb2.FlushCacheRequest(), timeout=10).blocks_forgotten)


# ------------------------------------------------------------------ R61


@pytest.mark.parametrize("length", [1, 2, *EDGES, 47, 48, 49])
def test_r61_the_same_prompt_again(engine: Engine, uncached: Engine, length: int) -> None:
    prompt = text(length, length)
    flush(engine)  # others may have begun with the same token
    reference = run(uncached, prompt, logprobs=2)
    first = run(engine, prompt, logprobs=2)
    again = run(engine, prompt, logprobs=2)
    assert told(first) == told(again) == told(reference)
    assert (cached(first), cached(again)) == (0, length - 1)
    longer = run(engine, prompt, max_tokens=20)
    assert told(longer) == told(run(uncached, prompt, max_tokens=20))
    params: dict[str, Any] = {"n": 2, "temperature": 1.0, "seed": 7}
    assert told(run(engine, prompt, **params)) == told(run(uncached, prompt, **params))
    engine.wait_idle()


def test_flushed_is_forgotten(engine: Engine) -> None:
    prompt = text(100, 40)
    first = run(engine, prompt, logprobs=0)
    assert cached(run(engine, prompt)) == 39
    assert flush(engine) > 0
    again = run(engine, prompt, logprobs=0)
    assert cached(again) == 0
    assert told(again) == told(first)
    assert flush(engine) > 0
    assert flush(engine) == 0


def test_a_salt_separates(engine: Engine) -> None:
    prompt = text(101, 40)

    def salted(salt: str) -> Choices:
        request = generate_request(prompt, max_tokens=4, ignore_eos=True, temperature=0.0)
        request.cache_salt = salt
        return joined(engine.stub.Generate(request, timeout=60))

    answers = [salted(salt) for salt in ("a", "b", "a", "")]
    assert [cached(answer) for answer in answers] == [0, 0, 39, 0]
    assert all(told(answer) == told(answers[0]) for answer in answers)


# ------------------------------------------------------------------ R30


@pytest.mark.parametrize("length", EDGES)
def test_r30_prompt_logprobs_twice(engine: Engine, uncached: Engine, length: int) -> None:
    prompt = text(200 + length, length)
    reference = run(uncached, prompt, prompt_logprobs=1)
    assert len(reference.prompt_logprobs) == length
    first = run(engine, prompt, prompt_logprobs=1)
    run(engine, [*prompt[: length - 3], 1, 2, 3, 4])
    run(engine, prompt)
    again = run(engine, prompt, prompt_logprobs=1)
    assert told(first) == told(again) == told(reference)
    engine.wait_idle()


# ------------------------------------------------------------------ R66


def test_r66_200_equal_prompts_at_once(engine: Engine, uncached: Engine) -> None:
    prompt = text(300, 48)
    reference = told(run(uncached, prompt, logprobs=1))
    with ThreadPoolExecutor(200) as pool:
        answers = list(pool.map(lambda _: run(engine, prompt, logprobs=1), range(200)))
    assert all(told(answer) == reference for answer in answers)
    found = sorted(cached(answer) for answer in answers)
    assert (found[0], found[-1]) == (0, 47)
    assert found.count(0) == 1, "the others wait for what the first one computes"
    engine.wait_idle()


def test_r66_2000_tiny_requests(model: Path, tmp_path: Path) -> None:
    """Answered, refused for a full queue, or timed out in it, in which case they never run."""
    flags = (*SMALL, *FEW_SEQUENCES, "--max-num-waiting", "100", "--queue-timeout", "0.05")
    ends: list[str] = []
    answers: dict[int, list[int]] = {}
    with running_engine(model, tmp_path / "run", *flags) as engine:
        calls = [
            engine.stub.Generate(
                generate_request([number % 256], max_tokens=1, temperature=0.0), timeout=100
            )
            for number in range(2000)
        ]
        for number, call in enumerate(calls):
            try:
                answers[number] = joined(call).ids[0]
            except grpc.RpcError as error:
                ends.append(as_error(error).code().name)
            else:
                ends.append("OK")
        stats = engine.wait_idle()
        assert set(ends) <= {"OK", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"}
        assert ends.count("OK") > 100
        assert stats.generated_tokens_total == ends.count("OK")
        assert stats.requests_timed_out_total == ends.count("DEADLINE_EXCEEDED")
        for number in list(answers)[::20]:
            again = run(engine, [number % 256], max_tokens=1, ignore_eos=False)
            assert answers[number] == again.ids[0]


# ------------------------------------------------------------------ R64

EIGHT: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 1},
    {"frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"temperature": 1.0, "seed": 2, "repetition_penalty": 1.4, "logprobs": 3},
    {"temperature": 1.2, "seed": 3, "stop": ["e", "zz"], "min_tokens": 4},
    {"temperature": 1.0, "seed": 4, "n": 2, "top_k": 9},
    {"no_repeat_ngram_size": 2, "logprobs": 1, "prompt_logprobs": 1},
    {"temperature": 0.8, "seed": 5, "top_p": 0.8, "logit_bias": {66: 4.0}},
]


def test_r64_preempted_as_if_never(small_pool: Engine, uncached: Engine) -> None:
    """60 tokens each; the pool holds three of the eight."""
    requests = [(text(400 + i, 20), params | {"max_tokens": 60}) for i, params in enumerate(EIGHT)]
    reference = [told(run(uncached, prompt, **params)) for prompt, params in requests]
    before = small_pool.stats("scheduler").scheduler
    with ThreadPoolExecutor(8) as pool:
        with small_pool.frozen():  # until all are there: each of them takes a moment only
            sent = [pool.submit(run, small_pool, prompt, **params) for prompt, params in requests]
            until(lambda: small_pool.stats("tokenizer-0").tokenizer.requests_running == 8)
        answers = [each.result() for each in sent]
    assert [told(answer) for answer in answers] == reference
    after = small_pool.wait_idle()
    assert after.preemptions_total > before.preemptions_total
    assert after.steps_total - before.steps_total < 9 * 60 * 2


# ------------------------------------------------------------------ R65


def test_r65_cancelled_in_any_state(small_pool: Engine, uncached: Engine) -> None:
    """Queued, in their chunks, at the first token, later, preempted; three choices at once."""
    source = random.Random(65)
    kinds: list[dict[str, Any]] = [
        {}, {"n": 3, "temperature": 1.0, "seed": 1}, {"prompt_logprobs": 1},
        {"beam": {"width": 2}, "max_tokens": 20},
    ]  # fmt: skip
    plans = [(text(500 + i, source.randint(1, 60)), kinds[i % 4], i) for i in range(120)]

    def ended_by(plan: tuple[list[int], dict[str, Any], int]) -> str:
        prompt, params, number = plan
        wanted: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "temperature": 0.0} | params
        if "beam" in wanted:
            del wanted["temperature"]
        call = small_pool.stub.Generate(generate_request(prompt, **wanted), timeout=120)
        timer = threading.Timer(0.004 * (number % 60), call.cancel)
        timer.start()
        try:
            for response in call:
                if number % 7 == 0 and response.token_ids:
                    call.cancel()
        except grpc.RpcError as error:
            return as_error(error).code().name
        finally:
            timer.cancel()
        return "OK"

    steady = text(600, 30)
    with ThreadPoolExecutor(33) as pool:
        good = [pool.submit(run, small_pool, steady, max_tokens=40, logprobs=1) for _ in range(4)]
        ends = list(pool.map(ended_by, plans))
        answers = [told(each.result()) for each in good]
    assert set(ends) <= {"OK", "CANCELLED"}
    assert ends.count("CANCELLED") > 40
    reference = told(run(uncached, steady, max_tokens=40, logprobs=1))
    assert answers == [reference] * 4
    small_pool.wait_idle()
    assert told(run(small_pool, steady, max_tokens=40, logprobs=1)) == reference


# ------------------------------------------------------------------ R23, R24

X, Y, Z = ord("x"), ord("y"), ord("z")
PENALTIES: list[dict[str, float]] = [
    {"presence_penalty": 1.0}, {"frequency_penalty": 1.0}, {"repetition_penalty": 2.0},
]  # fmt: skip


@pytest.fixture(scope="module")
def markov(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """After anything: x half of the time, y and z a quarter each. Logprobs of what is drawn by."""
    folder = tmp_path_factory.mktemp("markov")
    table = np.zeros((V, V))
    table[:, [X, Y, Z]] = [0.5, 0.25, 0.25]
    write_s1_markov(folder / "model", table, max_position_embeddings=128)
    flags = (*SMALL, "--logprobs-mode", "processed_logprobs", "--max-num-batched-tokens", "4",
             "--max-num-seqs", "4")  # fmt: skip
    with running_engine(folder / "model", folder / "run", *flags) as engine:
        yield engine
        engine.wait_idle()


@pytest.mark.parametrize("params", PENALTIES, ids=str)
def test_r23_penalties_count_what_they_are_to(markov: Engine, params: dict[str, float]) -> None:
    """In two chunks, then on a cache hit."""
    prompt = [ord("a"), *[X] * 5]
    for _ in range(2):
        answer = run(markov, prompt, max_tokens=4, temperature=1.0, seed=5, logprobs=3, **params)
        for step, row in enumerate(answer.logprobs[0]):
            output = answer.ids[0][:step]
            logits = {X: np.log(0.5), Y: np.log(0.25), Z: np.log(0.25)}
            for token in logits:
                if token in (X, *output):
                    logits[token] *= params.get("repetition_penalty", 1.0)
                count = output.count(token)
                logits[token] -= params.get("frequency_penalty", 0.0) * count
                logits[token] -= params.get("presence_penalty", 0.0) * (count > 0)
            total = np.logaddexp.reduce(list(logits.values()))
            assert {top.token_id: top.logprob for top in row.top} == pytest.approx(
                {token: logit - total for token, logit in logits.items()}, abs=1e-4
            )
    assert cached(answer) == 5


def test_r24_very_different_neighbours(engine: Engine, uncached: Engine) -> None:
    requests = [(text(700 + i, 4 + 6 * i), params) for i, params in enumerate(EIGHT)]
    reference = [told(run(uncached, prompt, **params)) for prompt, params in requests]
    for order in range(5):
        shuffled = list(range(8))
        random.Random(order).shuffle(shuffled)
        with ThreadPoolExecutor(8) as pool:
            answers = list(
                pool.map(lambda i: run(engine, requests[i][0], **requests[i][1]), shuffled)
            )
        assert [told(answer) for answer in answers] == [reference[i] for i in shuffled]
    engine.wait_idle()
