"""Answers of a model on the device, steps in flight: in graphs and eager, alone and in company,
and those of Hugging Face's transformers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from device_driver import DeviceDriver, Sample
from step_driver import DrivenSequence
from tiny_models import reference_logits, save, tiny_model
from triptych.engine_core.layout import PREVIOUS_SAMPLE
from triptych.kernels.sampler_params import SamplerParams
from triptych.services.executor.backend import BackendOptions, KvCacheDtype, open_backend
from triptych.services.executor.device.backend import DeviceBackend
from triptych.services.runtime.model_files import resolve_model

OPTIONS = BackendOptions(
    device="cuda", dtype="float32", block_size=16, kv_cache_memory=1 << 24,
    max_num_seqs=8, max_num_batched_tokens=256, max_model_len=128,
)  # fmt: skip
GREEDY = SamplerParams(temperature=0.0)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    """Of transformers, random."""
    return tiny_model("llama", {"head_dim": 64, "num_attention_heads": 4})


@pytest.fixture(scope="module")
def folder(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model")
    save(model, out)
    return out


@contextmanager
def opened(folder: Path, options: BackendOptions) -> Iterator[DeviceBackend]:
    backend = open_backend(resolve_model(str(folder)), options)
    assert isinstance(backend, DeviceBackend)
    try:
        yield backend
    finally:
        backend.close()


def answers(
    backend: DeviceBackend, prompts: list[list[int]], length: int, params: SamplerParams
) -> list[list[int]]:
    """Of all prompts together, each step launched before the last one is waited for."""
    driver = DeviceDriver(backend)
    sequences = [DrivenSequence() for _ in prompts]
    flying = [
        driver.launch(
            list(zip(sequences, prompts, strict=True)),
            [Sample(row, params, 0) for row in range(len(prompts))],
        )
    ]
    columns = []
    for position in range(1, length):
        flying.append(
            driver.launch(
                [(sequence, [PREVIOUS_SAMPLE - row]) for row, sequence in enumerate(sequences)],
                [Sample(row, params, position) for row in range(len(prompts))],
            )
        )
        columns.append(flying.pop(0).wait())
    columns.append(flying.pop().wait())
    tokens = np.stack([each.token_ids for each in columns if each is not None])
    return [column.tolist() for column in tokens.T]


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(count)
    return [rng.integers(0, 96, int(rng.integers(1, 30))).tolist() for _ in range(count)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_graphs_give_what_eager_gives(folder: Path, temperature: float) -> None:
    params = SamplerParams(temperature=temperature, top_p=0.9, seed=3)
    found = []
    for options in (replace(OPTIONS, plan="cudagraph"), replace(OPTIONS, plan="eager")):
        with opened(folder, options) as backend:
            assert (backend.device_facts().num_graphs > 0) == (options.plan == "cudagraph")
            found.append(answers(backend, prompts(5), 20, params))
    assert found[0] == found[1]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8"])
def test_a_row_does_not_depend_on_the_others(folder: Path, kv_cache_dtype: KvCacheDtype) -> None:
    options = replace(OPTIONS, deterministic=True, kv_cache_dtype=kv_cache_dtype)
    params = SamplerParams(temperature=0.8, seed=11)
    with opened(folder, options) as backend:
        together = answers(backend, prompts(7), 16, params)
        alone = [answers(backend, [prompt], 16, params)[0] for prompt in prompts(7)]
    assert together == alone


def test_greedy_answers_are_transformers(folder: Path, model: torch.nn.Module) -> None:
    with opened(folder, OPTIONS) as backend:
        for prompt in prompts(4):
            (ours,) = answers(backend, [prompt], 12, GREEDY)
            logits = reference_logits(model, [*prompt, *ours])[len(prompt) - 1 : -1]
            # The same token each time, or one that float32 cannot tell from it.
            lost = logits.max(axis=1) - logits[np.arange(12), ours]
            assert lost.max() <= 1e-4
