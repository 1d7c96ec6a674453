"""Tensor parallelism of the device plan: what a rank loads, and that ranks together are one."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from device_driver import DeviceDriver, Sample
from step_driver import DrivenSequence, StepDriver
from thread_ranks import ThreadRank, on_all_ranks
from tiny_models import reference_logits, save, tiny_model, write_gguf
from triptych.engine_core.layout import PREVIOUS_SAMPLE
from triptych.kernels.sampler_params import SamplerParams
from triptych.services.executor.backend import BackendOptions
from triptych.services.executor.device.backend import DeviceBackend, open_device_backend
from triptych.services.executor.device.runtime import NO_DEVICE_INPUTS
from triptych.services.executor.device.shard import Shard
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.runtime.model_files import resolve_model

OPTIONS = BackendOptions(
    device="emulated", block_size=4, kv_cache_memory=1 << 19, threads=1,
    max_num_seqs=4, max_num_batched_tokens=64,
)  # fmt: skip
# 95 ids: the last rank's rows are padded. One key-value head for two ranks: replicated.
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True, "vocab_size": 95}),
    "tied": ("qwen2", {"tie_word_embeddings": True, "vocab_size": 95}),
    "shared_heads": ("llama", {"num_key_value_heads": 1}),
}


def opened(path: Path, size: int) -> list[DeviceBackend]:
    def work(rank: ThreadRank) -> DeviceBackend:
        options = replace(OPTIONS, rank=rank.rank, tensor_parallel_size=size)
        return open_device_backend(resolve_model(str(path)), options, lambda *_: None, rank)

    return on_all_ranks(size, work)


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_compute_what_one_does(name: str, tmp_path: Path) -> None:
    """Logits near transformers', and the same tokens, two steps in flight."""
    family, sizes = MODELS[name]
    model = tiny_model(family, sizes)
    save(model, tmp_path)
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, 95, length).tolist() for length in (9, 3)]
    params = SamplerParams(temperature=0.9, seed=5)
    drawn = []
    for size in (1, 2):
        backends = opened(tmp_path, size)
        drivers = [DeviceDriver(backend) for backend in backends]
        sequences = [[DrivenSequence(), DrivenSequence()] for _ in backends]
        out = []
        samples = [Sample(row, params._replace(choice=row)) for row in range(2)]
        rows = [list(zip(mine, tokens, strict=True)) for mine in sequences]
        steps = [
            driver.launch(each, samples, [0, 1]) for driver, each in zip(drivers, rows, strict=True)
        ]
        for position in range(1, 6):
            following = [
                driver.launch(
                    [(each, [PREVIOUS_SAMPLE - row]) for row, each in enumerate(mine)],
                    [replace(sample, position=position) for sample in samples],
                    [0] if position == 5 else [],
                )
                for driver, mine in zip(drivers, sequences, strict=True)
            ]
            results = [step.wait() for step in steps]
            assert results[0] is not None
            assert results[1:] == [None] * (size - 1)
            out.append(results[0].token_ids.tolist())
            if position == 1:
                expected = [reference_logits(model, text)[-1] for text in tokens]
                np.testing.assert_allclose(drivers[0].logits[:2], expected, atol=1e-4)
            steps = following
        for step in steps:
            step.wait()
        drawn.append(out)
        for backend in backends:
            backend.close()
    assert drawn[0] == drawn[1]


def test_a_rank_has_its_part_of_the_weights_and_of_the_cache(tmp_path: Path) -> None:
    save(tiny_model("llama", {}), tmp_path)
    (one,), (first, second) = opened(tmp_path, 1), opened(tmp_path, 2)
    # Norms and angles (128 positions of head_dim 8) are everybody's.
    shared = 4 * (5 * 48 + 128 * 8)
    whole = one.facts.weight_bytes - shared
    assert first.facts.weight_bytes - shared == second.facts.weight_bytes - shared == whole // 2
    assert first.facts.num_blocks == second.facts.num_blocks == 2 * one.facts.num_blocks
    for backend in (one, first, second):
        backend.close()


def test_the_ranks_agree_on_the_number_of_blocks(tmp_path: Path) -> None:
    save(tiny_model("llama", {}), tmp_path)

    def work(rank: ThreadRank) -> int:
        options = replace(
            OPTIONS, rank=rank.rank, tensor_parallel_size=2, kv_cache_memory=1 << 18 << rank.rank
        )
        backend = open_device_backend(resolve_model(str(tmp_path)), options, lambda *_: None, rank)
        backend.close()
        return backend.facts.num_blocks

    first, second = on_all_ranks(2, work)
    assert first == second


def test_a_gguf_is_cut_in_the_same_way(tmp_path: Path) -> None:
    """Rows of q and k lie in another order there."""
    model = tiny_model("llama", {})
    path = tmp_path / "model.gguf"
    write_gguf(model, path)
    backends = opened(path, 2)
    drivers = [StepDriver(backend) for backend in backends]
    tokens = list(range(3, 20))
    steps = [
        backend.launch(driver.inputs([(DrivenSequence(), tokens)]), NO_DEVICE_INPUTS, driver.logits)
        for driver, backend in zip(drivers, backends, strict=True)
    ]
    for step in steps:
        step.wait()
    expected = reference_logits(model, tokens)[-1]
    np.testing.assert_allclose(drivers[0].logits[0], expected, atol=1e-4)
    assert (drivers[1].logits == 7.0).all(), "rank 1 has no logits to give"
    for backend in backends:
        backend.close()


@pytest.mark.parametrize(
    ("sizes", "ranks", "said"),
    [
        ({}, 5, "tensor_parallel_size 5 does not divide num_heads 6"),
        ({"intermediate_size": 81}, 2, "does not divide intermediate_size 81"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 2},
            3,
            "tensor_parallel_size 3 neither divides num_kv_heads 2, nor is a multiple of it",
        ),
    ],
)
def test_what_does_not_divide_is_refused_by_name(
    sizes: dict[str, object], ranks: int, said: str, tmp_path: Path
) -> None:
    save(tiny_model("llama", {"intermediate_size": 90, **sizes}), tmp_path)

    class OneOfMany(ThreadRank):
        def __init__(self) -> None:
            self.rank, self.size = 0, ranks

    options = replace(OPTIONS, tensor_parallel_size=ranks)
    with pytest.raises(StartupError, match=said):
        open_device_backend(resolve_model(str(tmp_path)), options, lambda *_: None, OneOfMany())


def test_spans_cover_everything_once() -> None:
    for size in (1, 2, 3, 4, 6):
        spans = [Shard(rank, size).span(12) for rank in range(size)]
        assert [at for start, stop in spans for at in range(start, stop)] == list(range(12))
        for vocabulary in (1, 7, 12, 95):
            parts = [Shard(rank, size).vocabulary(vocabulary) for rank in range(size)]
            rows = [at for start, stop, _ in parts for at in range(start, stop)]
            assert rows == list(range(vocabulary))
            assert len({padded for _, _, padded in parts}) == 1
    assert [Shard(rank, 4).kv_span(2) for rank in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]
