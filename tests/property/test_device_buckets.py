"""Graphs of decode steps: which one a step takes, and that its padding has no influence at all."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from step_driver import DrivenSequence, StepDriver
from tiny_models import save, tiny_model
from triptych.services.executor.backend import BackendOptions, open_backend
from triptych.services.executor.device.backend import DeviceBackend
from triptych.services.executor.device.buckets import LARGEST, Buckets
from triptych.services.runtime.model_files import resolve_model


@given(max_num_seqs=st.integers(1, 2000))
def test_every_batch_has_the_smallest_bucket_that_holds_it(max_num_seqs: int) -> None:
    buckets = Buckets.usual(max_num_seqs)
    assert list(buckets.sizes) == sorted(set(buckets.sizes))
    most = min(max_num_seqs, LARGEST)
    assert buckets.sizes[-1] == most
    for rows in range(1, most + 1):
        size = buckets.for_rows(rows)
        assert size is not None
        assert size >= rows
        assert not [other for other in buckets.sizes if rows <= other < size]
        assert size - rows < 16, "little is computed in vain"
    assert buckets.for_rows(most + 1) is None


def test_the_usual_sizes() -> None:
    sizes = Buckets.usual(1024).sizes
    assert sizes[:6] == (1, 2, 4, 8, 16, 24)
    assert sizes[-17:-15] == (256, 272)
    assert sizes[-1] == 512


@given(
    sizes=st.lists(st.integers(0, 600), max_size=12),
    max_num_seqs=st.integers(1, 300),
    rows=st.integers(1, 300),
)
def test_sizes_that_were_asked_for(sizes: list[int], max_num_seqs: int, rows: int) -> None:
    buckets = Buckets.of(sizes, max_num_seqs)
    assert set(buckets.sizes) <= {*sizes, max_num_seqs}
    assert all(1 <= size <= max_num_seqs for size in buckets.sizes), "buffers hold no more rows"
    assert list(buckets.sizes) == sorted(set(buckets.sizes))
    if rows <= max_num_seqs:
        holding = [min(size, max_num_seqs) for size in sizes if size >= rows]
        assert buckets.for_rows(rows) == (min(holding) if holding else None)


def test_sizes_above_every_step_are_captured_for_the_largest(tmp_path: Path) -> None:
    save(tiny_model("llama", {}), tmp_path)
    backend = _opened(tmp_path, capture_sizes=(3, 700))
    assert backend.device_facts().num_graphs == 2
    backend.close()


class Pair:
    """One model with graphs, one that runs eagerly."""

    def __init__(self, folder: Path) -> None:
        save(tiny_model("mistral", {"sliding_window": 9}), folder)
        self.graphs, self.eager = (
            _opened(folder, capture_sizes=(1, 4, 10)),
            _opened(folder, capture_sizes=None, plan="eager"),
        )


def _opened(
    folder: Path, capture_sizes: tuple[int, ...] | None, plan: str = "cudagraph"
) -> DeviceBackend:
    backend = open_backend(
        resolve_model(str(folder)),
        BackendOptions(
            device="emulated", plan="eager" if plan == "eager" else "cudagraph", block_size=4,
            kv_cache_memory=1 << 20, threads=1, capture_sizes=capture_sizes,
            max_num_seqs=10, max_num_batched_tokens=64,
        ),
    )  # fmt: skip
    assert isinstance(backend, DeviceBackend)
    return backend


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(Path(folder))
        yield pair
        pair.graphs.close()
        pair.eager.close()


def test_the_plans_are_what_they_say(pair: Pair) -> None:
    assert pair.graphs.facts.plan == "cudagraph"
    assert pair.graphs.device_facts().num_graphs == 3
    assert pair.eager.facts.plan == "eager"
    assert pair.eager.device_facts().num_graphs == 0


@settings(max_examples=25)
@given(
    batches=st.lists(st.sets(st.integers(0, 9), min_size=1), min_size=1, max_size=6),
    seed=st.integers(0, 1 << 16),
)
def test_padding_has_no_influence(pair: Pair, batches: list[set[int]], seed: int) -> None:
    """Any decode steps: bit for bit what an eager plan computes, which pads nothing; and nothing
    of the cache changes but the slots that the step's own tokens are stored to."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 96, int(rng.integers(1, 12))).tolist() for _ in range(10)]
    drivers = [StepDriver(backend) for backend in (pair.graphs, pair.eager)]
    sequences = [[DrivenSequence() for _ in prompts] for _ in drivers]
    for driver, mine in zip(drivers, sequences, strict=True):
        for sequence, prompt in zip(mine, prompts, strict=True):
            driver.step([(sequence, prompt)])
    for batch in batches:
        tokens = {index: int(rng.integers(0, 96)) for index in sorted(batch)}
        before = cache_bytes(pair.graphs)
        rows = [(sequences[0][index], [token]) for index, token in tokens.items()]
        got = drivers[0].step(rows)
        changed = np.flatnonzero((cache_bytes(pair.graphs) != before).any(axis=1))
        written = {
            sequence.blocks[at // 4] * 4 + at % 4
            for sequence, _ in rows
            for at in [sequence.computed - 1]
        }
        assert set(changed.tolist()) <= written
        expected = drivers[1].step(
            [(sequences[1][index], [token]) for index, token in tokens.items()]
        )
        np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


def cache_bytes(backend: DeviceBackend) -> NDArray[np.uint8]:
    """The whole cache as uint8 [slots, bytes of a token]."""
    data = backend.cache_on_the_host()
    blocks, block_size = data.shape[2:4]
    by_slot = data.permute(2, 3, 0, 1, 4, 5).reshape(blocks * block_size, -1).contiguous()
    out: NDArray[np.uint8] = by_slot.numpy().view(np.uint8)
    return out
