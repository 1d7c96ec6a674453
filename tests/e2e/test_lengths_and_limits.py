"""One rule for lengths: prompt + output <= max_model_len. For the pool: never a wedged queue."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc
import pytest

from engine import Engine, running_engine
from grpc_errors import refused, violations
from leaving import until
from small_engines import tiny_model
from triptych.v1 import common_pb2, inference_pb2

pytestmark = pytest.mark.e2e

LENGTH = common_pb2.FINISH_REASON_LENGTH
CONTEXT = 64


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("lengths")
    model = tiny_model(folder, max_position_embeddings=CONTEXT)
    flags = ("--kv-cache-memory", "1MiB", "--cpu-threads", "1")
    with running_engine(model, folder / "run", *flags) as engine:
        yield engine
        engine.wait_idle()


def drain(engine: Engine, request: inference_pb2.GenerateRequest) -> None:
    for _ in engine.stub.Generate(request, timeout=10):
        pass


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "fits"),
    [(63, 1, True), (63, 2, False), (64, 1, False), (65, 1, False),
     (8, 56, True), (8, 57, False), (8, 61, False)],
)  # fmt: skip
def test_prompt_and_output_share_the_context(
    engine: Engine, prompt: int, max_tokens: int, fits: bool
) -> None:
    params: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
    if fits:
        answer = engine.generate([7] * prompt, **params)
        assert (answer.prompt_tokens, answer.completion_tokens) == (prompt, max_tokens)
        assert answer.finish_reason == LENGTH
        return
    error = refused(lambda: engine.generate([7] * prompt, **params))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    for number in (prompt, max_tokens, CONTEXT):
        assert str(number) in error.details()


def test_unset_max_tokens_takes_what_the_context_leaves(engine: Engine) -> None:
    answer = engine.generate([7] * 60, temperature=0.0, ignore_eos=True)
    assert (answer.completion_tokens, answer.finish_reason) == (4, LENGTH)


def test_an_empty_prompt_is_refused_and_costs_nobody(engine: Engine) -> None:
    reference = engine.generate([1, 2, 3], max_tokens=4, temperature=0.0).token_ids
    for request in (
        inference_pb2.GenerateRequest(),
        inference_pb2.GenerateRequest(text=""),
        inference_pb2.GenerateRequest(token_ids=common_pb2.TokenIds()),
    ):
        error = refused(partial(drain, engine, request))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert violations(error)
    error = refused(lambda: list(engine.stub.Chat(inference_pb2.ChatRequest(), timeout=10)))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "messages" in violations(error)
    engine.wait_idle()
    assert engine.generate([1, 2, 3], max_tokens=4, temperature=0.0).token_ids == reference


@pytest.fixture(scope="module")
def small_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A long context over a pool of few blocks."""
    folder = tmp_path_factory.mktemp("pool")
    model = tiny_model(folder, max_position_embeddings=2048)
    # 2 layers x 16 tokens x 2 heads x (k of 8, v in lanes of 16) x 2 bytes = 3 KiB: 49 blocks
    flags = ("--kv-cache-memory", str(49 * 3072), "--cpu-threads", "1")
    with running_engine(model, folder / "run", *flags) as engine:
        yield engine
        engine.wait_idle()


def test_a_prompt_that_the_pool_can_never_hold_is_refused_at_once(small_pool: Engine) -> None:
    assert small_pool.wait_idle().blocks_total == 49
    error = refused(lambda: small_pool.generate([7] * 1000, max_tokens=8))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "1000" in error.details()
    assert str(49 * 16) in error.details()
    params: dict[str, Any] = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
    assert small_pool.generate([7] * 8, timeout=30, **params).completion_tokens == 4


def test_an_answer_that_would_outgrow_the_pool_is_refused_at_once(small_pool: Engine) -> None:
    error = refused(
        lambda: small_pool.generate([7] * 500, max_tokens=400, ignore_eos=True, temperature=0.0)
    )
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    answer = small_pool.generate([7] * 500, ignore_eos=True, temperature=0.0)
    assert answer.prompt_tokens + answer.completion_tokens == 49 * 16


def test_preemption_changes_no_answer(small_pool: Engine) -> None:
    """Eight sequences of which the pool holds three at a time."""
    prompts = [[i + 1, 50, 60 + i] * 40 for i in range(8)]
    params: dict[str, Any] = {"max_tokens": 120, "ignore_eos": True, "temperature": 0.0}
    alone = [small_pool.generate(prompt, **params).token_ids for prompt in prompts]
    before = small_pool.stats("scheduler").scheduler.preemptions_total
    with ThreadPoolExecutor(8) as pool:
        with small_pool.frozen():  # until all are there: each of them takes a moment only
            sent = [pool.submit(small_pool.generate, prompt, **params) for prompt in prompts]
            until(lambda: small_pool.stats("tokenizer-0").tokenizer.requests_running == 8)
        together = [each.result().token_ids for each in sent]
    assert together == alone
    assert small_pool.stats("scheduler").scheduler.preemptions_total > before
    small_pool.wait_idle()
