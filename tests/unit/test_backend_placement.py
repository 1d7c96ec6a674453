"""What is meant for another kind of device is refused by name, before anything is loaded."""

from dataclasses import replace
from pathlib import Path

import pytest

from small_engines import tiny_model
from triptych.services.executor.backend import (
    BackendFacts,
    BackendOptions,
    DeviceFacts,
    load_model,
    open_backend,
    refuse_misplaced,
)
from triptych.services.executor.stats import Counters, executor_stats
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.runtime.model_files import resolve_model

CPU = BackendOptions()
GPU = BackendOptions(device="cuda")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (replace(CPU, plan="cudagraph"), "executor_plan cudagraph: for a GPU only"),
        (replace(CPU, tensor_parallel_size=2), "tensor_parallel_size 2: for a GPU only"),
        (replace(CPU, swap_space=1), "swap_space: for a GPU only, not for device cpu"),
        (replace(CPU, capture_sizes=(1,)), "cudagraph_capture_sizes: for a GPU"),
        (
            replace(GPU, plan="native"),
            "executor_plan native: for the CPU only, not for device cuda",
        ),
        (replace(GPU, memory_utilization=0.5), "gpu_memory_utilization is meant"),
        (replace(GPU, isa="avx2"), "cpu_isa avx2: for the CPU"),
        (replace(GPU, activation_dtype="int8"), "activation_dtype int8: for the CPU"),
    ],
)
def test_refusals(tmp_path: Path, options: BackendOptions, words: str) -> None:
    files = resolve_model(str(tiny_model(tmp_path)))
    for load in (open_backend, load_model):
        with pytest.raises(StartupError) as caught:
            load(files, options)
        assert words in str(caught.value)


def test_what_every_device_takes() -> None:
    for device in ("cpu", "cuda", "emulated"):
        for plan in ("auto", "eager"):
            refuse_misplaced(BackendOptions(device=device, plan=plan, threads=2, affinity=(0,)))
    refuse_misplaced(replace(GPU, plan="cudagraph", swap_space=1, tensor_parallel_size=2))


def test_a_draft_model_is_for_the_cpu(tmp_path: Path) -> None:
    files = resolve_model(str(tiny_model(tmp_path)))
    with pytest.raises(StartupError, match="speculative_model: for the CPU only"):
        load_model(files, replace(GPU, device="emulated"))


def test_stats_of_a_device() -> None:
    facts = BackendFacts(
        device="cuda",
        plan="cudagraph",
        dtype="bfloat16",
        architecture="L",
        model="m",
        parameters=1,
        weight_bytes=2,
        vocabulary_size=3,
        max_model_len=4,
        block_size=5,
        num_blocks=6,
        kv_cache_bytes=7,
        num_host_blocks=8,
    )
    device = DeviceFacts(
        num_graphs=1, graph_bytes=2, peak_memory_bytes=3, blocks_stored=4, blocks_loaded=5
    )
    stats = executor_stats(facts, Counters(), None, device, (1, 2))
    assert (stats.rank, stats.tensor_parallel_size, stats.num_host_blocks) == (1, 2, 8)
    assert (stats.num_graphs, stats.graph_bytes, stats.peak_memory_bytes) == (1, 2, 3)
    assert (stats.blocks_stored_total, stats.blocks_loaded_total) == (4, 5)
    plain = executor_stats(None, Counters())
    assert (plain.tensor_parallel_size, plain.num_graphs) == (1, 0)
