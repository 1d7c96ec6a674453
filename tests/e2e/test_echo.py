"""echo over gRPC: the prompt comes first, with every logprob that an evaluation wants."""

from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from choices import Choices, joined, values
from engine import Engine, generate_request, running_engine
from scripted_models import write_m2_random_llama
from small_engines import EXACT

pytestmark = pytest.mark.e2e

TEXT = "héllo 🙂, twice"
PROMPT = list(TEXT.encode())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("echo") / "model"
    write_m2_random_llama(folder)
    return folder


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with running_engine(model, tmp_path_factory.mktemp("echo") / "run", *EXACT) as engine:
        yield engine
        engine.wait_idle()


def echoed(engine: Engine, prompt: str | list[int], **params: Any) -> Choices:
    request = generate_request(prompt, **params)
    request.echo = True
    return joined(engine.stub.Generate(request, timeout=60))


@pytest.mark.parametrize("prompt", [TEXT, PROMPT], ids=["text", "ids"])
def test_every_prompt_token_has_its_logprob(
    model: Path, engine: Engine, prompt: str | list[int]
) -> None:
    answer = echoed(engine, prompt, logprobs=1, max_tokens=1, temperature=0.0)
    rows, ids = answer.logprobs[0], answer.ids[0]
    assert len(rows) == len(ids) == len(PROMPT) + 1
    assert ids[:-1] == [row.token_id for row in rows][:-1] == PROMPT
    assert values(rows)[0] is None
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        expected = network(torch.tensor([ids])).logits[0].log_softmax(-1)
    for position, row in enumerate(rows[1:], start=1):
        assert row.logprob == pytest.approx(float(expected[position - 1, ids[position]]), abs=1e-4)
        assert len(row.top) == 1
    assert answer.text[0].startswith(TEXT)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), 1)


def test_offsets_follow_from_the_bytes(engine: Engine) -> None:
    answer = echoed(engine, TEXT, logprobs=0, max_tokens=12, seed=3, ignore_eos=True)
    data = b"".join(row.token for row in answer.logprobs[0])
    assert data.decode(errors="replace") == answer.text[0]
    offsets = [0, *accumulate(len(row.token) for row in answer.logprobs[0])]
    assert offsets[0] == 0
    assert data[: offsets[len(PROMPT)]].decode() == TEXT


def test_the_output_is_that_without_echo(engine: Engine) -> None:
    params: dict[str, Any] = {"max_tokens": 8, "seed": 5, "n": 2}
    plain = joined(engine.stub.Generate(generate_request(PROMPT, **params)))
    answer = echoed(engine, PROMPT, **params)
    for index in (0, 1):
        assert answer.ids[index] == PROMPT + plain.ids[index]
        assert answer.text[index] == TEXT + plain.text[index]
        assert not answer.logprobs[index]


def test_echo_with_prompt_logprobs_of_another_size(engine: Engine) -> None:
    answer = echoed(engine, PROMPT, logprobs=1, prompt_logprobs=3, max_tokens=2, seed=1)
    assert [len(row.top) for row in answer.prompt_logprobs[1:]] == [3] * (len(PROMPT) - 1)
    assert [len(row.top) for row in answer.logprobs[0][1:]] == [1] * (len(PROMPT) + 1)
    shared = values(answer.logprobs[0][: len(PROMPT)])
    assert shared == values(answer.prompt_logprobs)
