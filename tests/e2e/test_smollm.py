"""The real model, end to end."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import Answer, Engine, running_engine
from triptych.v1 import common_pb2, inference_pb2

pytestmark = [pytest.mark.e2e, pytest.mark.smollm]

ROOT = Path(__file__).parents[2]
MODEL = ROOT / ".models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    run_dir = tmp_path_factory.mktemp("smollm") / "run"
    with running_engine(MODEL, run_dir, "--kv-cache-memory", "128MiB") as engine:
        yield engine
        engine.wait_idle()


def test_a_chat_answer(engine: Engine) -> None:
    message = inference_pb2.ChatMessage(role="user", content="What is the capital of France?")
    answer = Answer()
    params = common_pb2.SamplingParams(temperature=0.0, max_tokens=24)
    for response in engine.stub.Chat(
        inference_pb2.ChatRequest(messages=[message], sampling_params=params), timeout=60
    ):
        answer.add(response)
    assert answer.text == "The capital of France is Paris."
    assert answer.finish_reason == common_pb2.FINISH_REASON_STOP


def test_the_listed_model(engine: Engine) -> None:
    (model,) = engine.stub.ListModels(inference_pb2.ListModelsRequest()).models
    assert model.vocabulary_size == 49152
    assert model.max_model_len == 8192
    assert model.has_chat_template
    assert list(model.eos_token_ids) == [2]


@pytest.mark.timeout(600)  # 20 s, and 90 s where others keep the machine busy
def test_greedy_answers_are_those_of_transformers() -> None:
    """The full comparison is 20 prompts of 64 tokens: scripts/greedy_agreement.py."""
    result = subprocess.run(
        [sys.executable, ROOT / "scripts" / "greedy_agreement.py", "--model", MODEL,
         "--prompts", "4", "--tokens", "12"],
        capture_output=True, text=True, timeout=550, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
