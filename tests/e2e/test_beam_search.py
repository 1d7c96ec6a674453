"""Beam search over gRPC against transformers' generate on the random model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from choices import Choices, joined
from engine import Engine, generate_request, running_engine
from scripted_models import T1_EOS, write_m2_random_llama
from small_engines import EXACT
from triptych.v1 import common_pb2

pytestmark = pytest.mark.e2e

STOPPING: dict[str, bool | str] = {"TRUE": True, "FALSE": False, "NEVER": "never"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("beam") / "model"
    write_m2_random_llama(folder)
    return folder


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with running_engine(model, tmp_path_factory.mktemp("beam") / "run", *EXACT) as engine:
        yield engine
        engine.wait_idle()


def search(engine: Engine, prompt: list[int], beam: common_pb2.BeamSearch, **rest: Any) -> Choices:
    request = generate_request(prompt, beam=beam, **rest)
    return joined(engine.stub.Generate(request, timeout=60))


def reference(
    model: Path, prompt: list[int], beam: common_pb2.BeamSearch, stop: list[int], **rest: Any
) -> tuple[list[list[int]], list[float]]:
    """Outputs and scores of transformers, best first."""
    name = common_pb2.EarlyStopping.Name(beam.early_stopping).removeprefix("EARLY_STOPPING_")
    config = GenerationConfig(
        num_beams=beam.width,
        num_return_sequences=rest["n"],
        max_new_tokens=rest["max_tokens"],
        do_sample=False,
        length_penalty=beam.length_penalty,
        early_stopping=STOPPING[name],
        eos_token_id=stop,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        found = network.generate(torch.tensor([prompt]), generation_config=config)
    outputs = []
    for row in found.sequences[:, len(prompt) :].tolist():
        end = next((at + 1 for at, token in enumerate(row) if token in stop), len(row))
        outputs.append(row[:end])
    return outputs, found.sequences_scores.tolist()


@pytest.mark.parametrize("width", [2, 4, 9])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("stopping", STOPPING)
def test_hypotheses_are_those_of_transformers(
    model: Path, engine: Engine, width: int, length_penalty: float, stopping: str
) -> None:
    """With stop ids that are drawn often, so that hypotheses end at different lengths."""
    prompt = [width, 77, 3]
    stop = [T1_EOS, *range(0, 320, 9)]
    beam = common_pb2.BeamSearch(
        width=width,
        length_penalty=length_penalty,
        early_stopping=common_pb2.EarlyStopping.Value(f"EARLY_STOPPING_{stopping}"),
    )
    rest: dict[str, Any] = {"n": 2, "max_tokens": 12}
    answer = search(engine, prompt, beam, stop_token_ids=stop[1:], **rest)
    outputs, scores = reference(model, prompt, beam, stop, **rest)
    assert [answer.ids[index] for index in range(2)] == outputs
    assert [answer.score[index] for index in range(2)] == pytest.approx(scores, abs=1e-4)


def test_beams_in_company_and_after_one_another(engine: Engine) -> None:
    beam = common_pb2.BeamSearch(width=5)
    params: dict[str, Any] = {"n": 3, "max_tokens": 20}
    alone = [search(engine, [k, 5, 9], beam, **params) for k in range(4)]
    requests = [generate_request([k, 5, 9], beam=beam, **params) for k in range(4)]
    others = [generate_request([k] * 9, max_tokens=30, ignore_eos=True) for k in range(4)]
    calls = [engine.stub.Generate(request, timeout=60) for request in (*requests, *others)]
    together = [joined(call) for call in calls]
    for one, other in zip(alone, together, strict=False):
        assert (one.ids, one.score) == (other.ids, other.score)
    engine.wait_idle()


def test_nothing_comes_before_the_end_and_cancelling_frees_all(engine: Engine) -> None:
    beam = common_pb2.BeamSearch(width=8)
    answer = search(engine, [1, 2], beam, n=4, max_tokens=6, ignore_eos=True)
    assert answer.messages == 4
    assert sorted(answer.score.values(), reverse=True) == [answer.score[i] for i in range(4)]
    call = engine.stub.Generate(
        generate_request([1, 2], beam=beam, n=4, max_tokens=60, ignore_eos=True)
    )
    call.cancel()
    engine.wait_idle()
