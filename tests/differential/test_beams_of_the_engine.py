"""Beam search through scheduler, batch, sampler and model, against transformers' generate.

Several searches and a sampled request run at once, so that beams of different requests, forks, full
blocks and preempted beams meet in one step.
"""

import struct
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pytest
import torch

from real_core import CoreShape, RealCore, choices_of, spoil
from tiny_models import save, tiny_model
from transformers_beams import PADDING, assert_same_beams, transformers_beams
from triptych.engine_core.ids import RequestId
from triptych.engine_core.request import Request
from triptych.engine_core.sampling_params import BeamParams, EarlyStopping, SamplingParams
from triptych.services.executor.backend import Backend, BackendOptions, open_backend
from triptych.services.runtime.model_files import resolve_model

VOCABULARY = 96
STOPPINGS: list[EarlyStopping] = ["true", "false", "never"]
PENALTIES = [1.0, 0.0, 2.0, -1.0, 0.6]
# Roomy; in small steps; and without room for all beams at once.
SHAPES = {
    "roomy": CoreShape(),
    "chunked": CoreShape(max_num_batched_tokens=9, max_num_seqs=9, impl="python"),
    "tight": CoreShape(num_blocks=15),
}


@dataclass(frozen=True)
class Models:
    """One model: transformers', and as the engine's plans compute it."""

    reference: torch.nn.Module
    backends: dict[str, Backend]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    overrides = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": PADDING}
    model = tiny_model("llama", overrides)
    with torch.no_grad():
        weights = dict(model.named_parameters())
        weights["lm_head.weight"].mul_(2.0)  # far from flat: ties would be anybody's
    folder = tmp_path_factory.mktemp("beams")
    save(model, folder)
    options = BackendOptions(kv_cache_memory=1 << 21, threads=1)
    plans: dict[str, BackendOptions] = {
        "eager": replace(options, plan="eager"),
        "native": replace(options, plan="native", kv_cache_dtype="float32"),
    }
    files = resolve_model(str(folder))
    return Models(model, {name: open_backend(files, plan) for name, plan in plans.items()})


def searches(seed: int) -> list[Request]:
    """Widths 2 to 4, every early_stopping, prompts of up to three blocks that begin alike; every
    other one has a stop among eight tokens."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(1, VOCABULARY, 45).tolist()
    requests = []
    for index in range(6):
        own = rng.integers(1, VOCABULARY, 3).tolist()
        prompt = shared[: int(rng.integers(1, 45))] + own[: int(rng.integers(0, 4))]
        stops = rng.choice(np.arange(1, VOCABULARY), 12, replace=False).tolist()
        width = 2 + index % 3
        params = SamplingParams(
            max_tokens=int(rng.integers(1, 21)),
            n=width,
            stop_token_ids=tuple(stops) if index % 2 else (),
            beam=BeamParams(
                width=width,
                length_penalty=PENALTIES[(seed + index) % len(PENALTIES)],
                early_stopping=STOPPINGS[(seed + index // 3) % 3],
            ),
        )
        requests.append(Request(RequestId(100 * (index + 1)), tuple(prompt), params))
    return requests


@pytest.mark.parametrize("plan", ["eager", "native"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_the_hypotheses_are_those_of_transformers(
    models: Models, plan: Literal["eager", "native"], shape: str, seed: int
) -> None:
    requests = searches(seed)
    sampled = Request(RequestId(1), (5, 6, 7), SamplingParams(max_tokens=30, seed=seed))
    spoil(models.backends[plan])
    core = RealCore(models.backends[plan], SHAPES[shape])
    answers = core.run([*requests, sampled], arrivals=[0, 0, 1, 3, 3, 8, 2])
    core.assert_empty()
    assert (core.scheduler.preemptions_total > 0) == (shape == "tight")
    for request in requests:
        beam, stops = request.params.beam, list(request.params.stop_token_ids)
        assert beam is not None
        ours = []
        for choice in choices_of(request):
            answer = answers[choice]
            (score,) = struct.unpack("<d", answer.score)
            ours.append((answer.token_ids, score))
            assert answer.finish == ("STOP" if answer.token_ids[-1] in stops else "LENGTH")
        reference = transformers_beams(
            models.reference, list(request.prompt_token_ids), beam, request.params.max_tokens, stops
        )
        assert_same_beams(ours, reference, stops)
