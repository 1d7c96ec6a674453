"""Logprobs over gRPC: closed forms on the scripted models, transformers on the random one."""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM

from choices import Choices, joined, values
from engine import Engine, generate_request, running_engine
from grpc_errors import refused, violations
from scripted_models import (
    T1_EOS,
    T2_FIRST_BYTE,
    write_m2_random_llama,
    write_s1_markov,
    write_s2_positions,
    write_t2_tokenizer,
)
from small_engines import EXACT, SMALL

pytestmark = pytest.mark.e2e

V = 320
SMILE = "🙂".encode()


def probabilities() -> npt.NDArray[np.float64]:
    """Of the next token: from 255 most likely down, each by the same factor; ids 256 on: never."""
    weights = np.zeros(V)
    weights[:256] = 1.02 ** np.arange(256)
    weights /= weights.sum()
    return weights


@pytest.fixture(scope="module")
def markov(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("markov")
    table = np.tile(probabilities(), (V, 1))
    write_s1_markov(folder / "model", table, max_position_embeddings=256)
    flags = (*SMALL, "--max-logprobs", "-1")
    with running_engine(folder / "model", folder / "run", *flags) as engine:
        yield engine
        engine.wait_idle()


@pytest.fixture(scope="module")
def m2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("m2") / "model"
    write_m2_random_llama(folder)
    return folder


@pytest.fixture(scope="module", params=["512", "8"], ids=["whole", "chunks of 8"])
def random_model(
    m2: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Engine]:
    run_dir = tmp_path_factory.mktemp("random") / "run"
    flags = (*EXACT, "--max-num-batched-tokens", request.param, "--max-num-seqs", "8")
    with running_engine(m2, run_dir, *flags) as engine:
        yield engine
        engine.wait_idle()


def run(engine: Engine, prompt: list[int], **params: Any) -> Choices:
    return joined(engine.stub.Generate(generate_request(prompt, **params), timeout=60))


@pytest.mark.parametrize("wished", [0, 1, 5, 20])
def test_exact_values(markov: Engine, wished: int) -> None:
    answer = run(markov, [1], logprobs=wished, max_tokens=30, seed=wished)
    logs = np.log(probabilities()[:256])
    for token, row in zip(answer.ids[0], answer.logprobs[0], strict=True):
        assert row.token_id == token
        assert row.logprob == pytest.approx(logs[token], abs=1e-4)
        assert row.rank == 256 - token
        assert [top.token_id for top in row.top] == list(range(255, 255 - wished, -1))
        assert [top.logprob for top in row.top] == pytest.approx(
            [logs[255 - rank] for rank in range(wished)], abs=1e-4
        )


def test_the_whole_vocabulary(markov: Engine) -> None:
    answer = run(markov, [1], logprobs=-1, max_tokens=3, seed=1)
    for row in answer.logprobs[0]:
        logprobs = np.array(row.vocabulary_logprobs)
        assert logprobs.shape == (V,)
        np.testing.assert_allclose(logprobs[:256], np.log(probabilities()[:256]), atol=1e-4)
        assert (logprobs[256:] < -1000).all()
        assert row.logprob == logprobs[row.token_id]


def test_they_are_the_models_own_whatever_samples(markov: Engine) -> None:
    """The default, raw_logprobs: filters, penalties and biases do not change them."""
    shaped = run(markov, [1], logprobs=0, max_tokens=9, seed=1, temperature=0.3, top_k=2,
                 presence_penalty=1.0, logit_bias={7: 50.0})  # fmt: skip
    for row in shaped.logprobs[0]:
        assert row.logprob == pytest.approx(math.log(probabilities()[row.token_id]), abs=1e-4)


@pytest.mark.parametrize("temperature", [1e-4, 1e-5, 1e-6, 1e-12, 1e-40, 0.0])
def test_tiny_temperatures_are_greedy_and_finite(markov: Engine, temperature: float) -> None:
    answer = run(markov, [1], logprobs=1, max_tokens=3, temperature=temperature, seed=1)
    assert answer.ids[0] == [255] * 3
    assert all(math.isfinite(row.logprob) for row in answer.logprobs[0])


@pytest.mark.parametrize("bias", [100.0, -100.0])
def test_a_bias_of_100_forces_and_forbids(markov: Engine, bias: float) -> None:
    answer = run(markov, [1], max_tokens=40, seed=1, logit_bias={255: bias})
    assert (answer.ids[0] == [255] * 40) == (bias > 0)
    assert (255 in answer.ids[0]) == (bias > 0)


def test_more_than_the_bound_is_refused(m2: Path, random_model: Engine) -> None:
    for field, wished in (("logprobs", 21), ("prompt_logprobs", 21), ("logprobs", -1)):
        bad: dict[str, Any] = {field: wished}
        request = generate_request([1], max_tokens=1, **bad)
        error = refused(partial(list, random_model.stub.Generate(request)))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert f"sampling_params.{field}" in violations(error)


def test_tokens_that_are_part_of_a_character(tmp_path: Path) -> None:
    script = [*b"a", *SMILE, *b"b", T1_EOS]
    write_s2_positions(tmp_path / "model", script)
    with running_engine(tmp_path / "model", tmp_path / "run", *SMALL) as engine:
        answer = run(engine, [1], logprobs=1, temperature=0.0)
        assert answer.text[0] == "a🙂b"
        rows = answer.logprobs[0]
        assert [row.token_id for row in rows] == script
        assert b"".join(row.token for row in rows) == answer.text[0].encode()
        assert [row.token for row in rows[1:5]] == [bytes([byte]) for byte in SMILE]
        cut = run(engine, [1], logprobs=0, temperature=0.0, stop=["🙂"])
        assert cut.text[0] == "a"
        assert [row.token_id for row in cut.logprobs[0]] == cut.ids[0] == [*b"a", *SMILE]
        engine.wait_idle()


def test_byte_fallback_tokens(tmp_path: Path) -> None:
    write_t2_tokenizer(tmp_path / "model")
    script = [T2_FIRST_BYTE + byte for byte in "世".encode()]
    write_s2_positions(tmp_path / "model", script, eos_token_id=2)
    with running_engine(tmp_path / "model", tmp_path / "run", *SMALL) as engine:
        answer = run(engine, [5], logprobs=0, temperature=0.0, max_tokens=3)
        assert answer.text[0] == "世"
        assert [row.token for row in answer.logprobs[0]] == [b"\xe4", b"\xb8", b"\x96"]


def reference(m2: Path, tokens: list[int]) -> torch.Tensor:
    """log_softmax at every position [tokens, V]."""
    model = AutoModelForCausalLM.from_pretrained(m2, dtype=torch.float32)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits.log_softmax(-1)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33])
def test_prompt_logprobs_cold_warm_and_chunked(m2: Path, random_model: Engine, length: int) -> None:
    generator = np.random.default_rng(length)
    prompt = generator.integers(0, 256, length).tolist()
    params: dict[str, Any] = {"prompt_logprobs": 3, "max_tokens": 4, "temperature": 0.0}
    cold = run(random_model, prompt, **params)
    between = run(random_model, [*prompt[: length // 2], 9, 9, 9], max_tokens=2)
    assert between.finish
    warm = run(random_model, prompt, **params)
    assert warm.prompt_logprobs == cold.prompt_logprobs
    assert warm.ids == cold.ids
    expected = reference(m2, prompt)
    rows = cold.prompt_logprobs
    assert [row.token_id for row in rows] == prompt
    assert values(rows)[0] is None
    for position, row in enumerate(rows[1:], start=1):
        before = expected[position - 1]
        assert row.logprob == pytest.approx(float(before[prompt[position]]), abs=1e-4)
        assert row.rank == 1 + int((before > before[prompt[position]]).sum())
        top = before.topk(3)
        assert [each.token_id for each in row.top] == top.indices.tolist()
        assert [each.logprob for each in row.top] == pytest.approx(top.values.tolist(), abs=1e-4)


def test_output_logprobs_are_those_of_transformers(m2: Path, random_model: Engine) -> None:
    prompt = list(range(40, 60))
    answer = run(random_model, prompt, logprobs=2, max_tokens=20, seed=9)
    tokens = answer.ids[0]
    expected = reference(m2, [*prompt, *tokens])
    for index, row in enumerate(answer.logprobs[0]):
        before = expected[len(prompt) + index - 1]
        assert row.logprob == pytest.approx(float(before[tokens[index]]), abs=1e-4)


def test_prompt_logprobs_that_are_cancelled_leave_nothing(random_model: Engine) -> None:
    prompt = list(range(50))
    calls = [
        random_model.stub.Generate(generate_request(prompt, prompt_logprobs=1, max_tokens=10))
        for _ in range(6)
    ]
    for call in calls:
        call.cancel()
    random_model.wait_idle()
    assert len(run(random_model, prompt, prompt_logprobs=1, max_tokens=1).prompt_logprobs) == 50


def test_choices_share_one_set_of_prompt_logprobs(random_model: Engine) -> None:
    prompt = list(range(30))
    answer = run(random_model, prompt, prompt_logprobs=0, n=3, max_tokens=3, seed=4)
    alone = run(random_model, prompt, prompt_logprobs=0, max_tokens=3, seed=4)
    assert answer.prompt_logprobs == alone.prompt_logprobs
    assert len(answer.prompt_logprobs) == 30
