"""The whole device plan on a GPU: against transformers, graphs against eager, steps in flight,
blocks to host memory and back, and the memory that it takes."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from device_driver import DeviceDriver, Sample, reference_draw
from step_driver import DrivenSequence
from tiny_models import reference_logits, save, tiny_model
from triptych.engine_core.layout import PREVIOUS_SAMPLE
from triptych.kernels.sampler_params import SamplerParams
from triptych.services.executor.backend import BackendOptions, KvCacheDtype, open_backend
from triptych.services.executor.device.backend import DeviceBackend
from triptych.services.runtime.model_files import resolve_model

SIZES: dict[str, object] = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024, "vocab_size": 1000,
}  # fmt: skip
OPTIONS = BackendOptions(
    device="cuda", dtype="float32", kv_cache_memory=64 << 20, max_num_seqs=40,
    max_num_batched_tokens=512, deterministic=True, swap_space=8 << 20,
)  # fmt: skip
GREEDY = SamplerParams(temperature=0.0)


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen2"])
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[torch.nn.Module, Path]:
    window: dict[str, object] = {"sliding_window": 50} if request.param == "mistral" else {}
    model = tiny_model(request.param, {**SIZES, **window})
    out = tmp_path_factory.mktemp("model")
    save(model, out)
    return model, out


@pytest.fixture(scope="module")
def backend(folder: tuple[torch.nn.Module, Path]) -> Iterator[DeviceBackend]:
    backend = opened(folder[1], OPTIONS)
    yield backend
    backend.close()


def opened(path: Path, options: BackendOptions) -> DeviceBackend:
    gc.collect()
    torch.cuda.empty_cache()
    backend = open_backend(resolve_model(str(path)), options)
    assert isinstance(backend, DeviceBackend)
    return backend


def tokens_of(length: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 1000, length)]


def test_logits_are_those_of_transformers(
    folder: tuple[torch.nn.Module, Path], backend: DeviceBackend
) -> None:
    """Chunks beside decoding rows, then graphs with padding."""
    texts = [tokens_of(length, length) for length in (300, 70, 1)]
    expected = [reference_logits(folder[0], text) for text in texts]
    driver, sequences = DeviceDriver(backend, 512), [DrivenSequence() for _ in texts]
    driver.step([(sequences[0], texts[0][:200])])
    got = driver.step([(sequences[0], texts[0][200:299]), (sequences[1], texts[1][:69])])
    np.testing.assert_allclose(got[0], expected[0][298], atol=2e-3)
    np.testing.assert_allclose(got[1], expected[1][68], atol=2e-3)
    got = driver.step([(each, text[-1:]) for each, text in zip(sequences, texts, strict=True)])
    for row in range(3):
        np.testing.assert_allclose(got[row], expected[row][-1], atol=2e-3)


@pytest.mark.parametrize("kv", ["auto", "int8", "fp8"])
def test_graphs_compute_what_the_eager_plan_does(
    folder: tuple[torch.nn.Module, Path], kv: KvCacheDtype
) -> None:
    """Bit for bit, in bfloat16, for batches that fill a bucket and for others; and a row does not
    depend on its company."""
    logits = []
    for plan in ("cudagraph", "eager"):
        options = replace(
            OPTIONS, plan="eager" if plan == "eager" else "cudagraph", dtype="bfloat16",
            kv_cache_dtype=kv,
        )  # fmt: skip
        backend = opened(folder[1], options)
        assert backend.facts.plan == plan
        driver = DeviceDriver(backend, 512, 40)
        sequences = [DrivenSequence() for _ in range(37)]
        for index, sequence in enumerate(sequences):
            driver.step([(sequence, tokens_of(3 + 7 * index, index))])
        out = [
            driver.step([(each, [int(index)]) for index, each in enumerate(sequences[:rows])])
            for rows in (37, 8, 3, 2, 1)
        ]
        alone = DrivenSequence()
        text = [*tokens_of(3, 0), 0]
        driver.step([(alone, text)])
        first = DrivenSequence()
        driver.step([(first, text[:2]), (sequences[5], [4])])
        again = driver.step([(first, text[2:]), (sequences[6], [4, 5])])[0]
        np.testing.assert_array_equal(again.view(np.uint32), out[0][0].view(np.uint32))
        logits.append(out)
        backend.close()
    for graphs, eager in zip(*logits, strict=True):
        np.testing.assert_array_equal(graphs.view(np.uint32), eager.view(np.uint32))


def test_two_steps_in_flight_draw_the_tokens_of_the_reference(backend: DeviceBackend) -> None:
    driver = DeviceDriver(backend)
    params = SamplerParams(temperature=0.9, top_p=0.95, seed=4, repetition_penalty=1.1)
    sequences = [DrivenSequence() for _ in range(3)]
    rows = [(each, tokens_of(9 + row, row)) for row, each in enumerate(sequences)]
    flying = driver.launch(rows, [Sample(row, params) for row in range(3)], range(3))
    known: list[list[int]] = [[] for _ in sequences]
    for position in range(1, 20):
        output = [[*known[row], PREVIOUS_SAMPLE - row] for row in range(3)]
        ahead = [Sample(row, params, position, (), output[row]) for row in range(3)]
        following = driver.launch(
            [(each, [PREVIOUS_SAMPLE - row]) for row, each in enumerate(sequences)], ahead
        )
        drawn = flying.wait()
        assert drawn is not None
        for row, token in enumerate(drawn.token_ids.tolist()):
            known[row].append(token)
        flying = following
    flying.wait()
    # One after the other, with the numbers in sight.
    driver, sequences = DeviceDriver(backend), [DrivenSequence() for _ in range(3)]
    rows = [(each, tokens_of(9 + row, row)) for row, each in enumerate(sequences)]
    for position in range(19):
        samples = [Sample(row, params, position, (), known[row][:position]) for row in range(3)]
        drawn_now = driver.draw(rows, samples)
        expected = [reference_draw(driver.logits[row], samples[row])[0] for row in range(3)]
        assert drawn_now.token_ids.tolist() == expected
        assert [tokens[position] for tokens in known] == expected
        rows = [(each, [token]) for each, token in zip(sequences, expected, strict=True)]


def test_blocks_go_to_host_memory_and_come_back(backend: DeviceBackend) -> None:
    driver = DeviceDriver(backend)
    sequence = DrivenSequence()
    driver.step([(sequence, tokens_of(48, 3))])
    expected = driver.step([(sequence, [30])])[0]
    sequence.computed = 48
    old = sequence.blocks[:3]
    stored = driver.launch(
        [(DrivenSequence(blocks=list(old)), tokens_of(48, 8))], [Sample(0, GREEDY)],
        stores=[(block, host) for host, block in enumerate(old)],
    )  # fmt: skip
    new = [driver.free.pop(0) for _ in range(3)]
    sequence.blocks = [*new, *sequence.blocks[3:]]
    loaded = driver.launch(
        [(sequence, [30])], [Sample(0, GREEDY)], [0],
        loads=[(host, block) for host, block in enumerate(new)],
    )  # fmt: skip
    stored.wait()
    loaded.wait()
    np.testing.assert_array_equal(driver.logits[0], expected)


def test_it_takes_the_share_of_memory_that_it_may(folder: tuple[torch.nn.Module, Path]) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    share = (total - free) / total + 0.05
    options = replace(OPTIONS, kv_cache_memory=None, gpu_memory_utilization=share)
    backend = opened(folder[1], options)
    left, _ = torch.cuda.mem_get_info()
    assert total - left <= (share + 0.01) * total
    assert backend.facts.kv_cache_bytes > 0.02 * total
    facts = backend.device_facts()
    assert facts.num_graphs == 8  # 1, 2, 4, by 8 to 40
    driver, sequences = DeviceDriver(backend, 512, 40), [DrivenSequence() for _ in range(40)]
    for start in range(0, 40, 4):
        driver.step([(each, tokens_of(120, start)) for each in sequences[start : start + 4]])
    driver.step([(each, [1]) for each in sequences])
    assert total - torch.cuda.mem_get_info()[0] <= (share + 0.01) * total
    backend.close()


@pytest.mark.parametrize("plan", ["cudagraph", "eager"])
def test_nothing_is_compiled_once_it_is_open(
    folder: tuple[torch.nn.Module, Path],
    monkeypatch: pytest.MonkeyPatch,
    plan: Literal["cudagraph", "eager"],
) -> None:
    """Whatever steps come: numbers of rows, of tokens and of samples, logprobs, a tokenizer with
    fewer ids than the model. Somebody would wait for it."""
    backend = opened(folder[1], replace(OPTIONS, plan=plan, deterministic=False))
    compiled: list[object] = []
    hook = "triton.knobs.runtime.jit_post_compile_hook"
    monkeypatch.setattr(hook, lambda **facts: compiled.append(facts["repr"]))
    driver = DeviceDriver(backend, 512, 40)
    params = SamplerParams(temperature=0.8, top_k=9, top_p=0.9, presence_penalty=0.5, logprobs=3)
    for count in (1, 2, 3, 5, 16, 17, 33, 39):
        sequences = [DrivenSequence() for _ in range(count)]
        samples = [Sample(row, params, output=[1]) for row in range(count)]
        prompts = [(each, tokens_of(1 + 2 * row % 11, row)) for row, each in enumerate(sequences)]
        for rows in (prompts, [(each, [7]) for each in sequences]):
            inputs, device = driver.write(rows, samples)
            device = replace(device, vocabulary_size=991)
            backend.launch(inputs, device, driver.logits).wait()
    assert compiled == []
    backend.close()
