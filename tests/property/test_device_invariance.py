"""A token's logits on an emulated device do not depend on its company, on how its prompt was cut,
or on whether a graph computed them. Bit for bit, as on the CPU."""

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
from triptych.services.executor.backend import Backend, BackendOptions, KvCacheDtype, open_backend
from triptych.services.runtime.model_files import resolve_model

Bits = NDArray[np.uint32]

LENGTH = 48
MODELS: dict[str, tuple[str, dict[str, object], KvCacheDtype]] = {
    "float32": ("llama", {}, "auto"),
    # Sizes that no vector register divides.
    "odd": ("qwen2", {"hidden_size": 42, "intermediate_size": 77, "num_attention_heads": 3,
                      "num_key_value_heads": 1}, "auto"),
    "int8": ("llama", {"num_key_value_heads": 1}, "int8"),
    "fp8 window": ("mistral", {"sliding_window": 7}, "fp8"),
}  # fmt: skip


class Model:
    """A model on two devices, and what each sequence should give."""

    def __init__(self, name: str, folder: Path) -> None:
        family, sizes, kv = MODELS[name]
        save(tiny_model(family, sizes), folder)
        self.eager = opened(folder, kv, BackendOptions(plan="eager"))
        self.graphs = opened(folder, kv, BackendOptions(plan="cudagraph", capture_sizes=(1, 3)))
        rng = np.random.default_rng(3)
        self.tokens = [rng.integers(0, 96, LENGTH).tolist() for _ in range(4)]
        self._expected: dict[tuple[int, int], Bits] = {}

    def expected(self, sequence: int, length: int) -> Bits:
        """Bits behind the first `length` tokens of a sequence: alone, whole, eagerly."""
        key = sequence, length
        if key not in self._expected:
            driver = StepDriver(self.eager)
            self._expected[key] = bits(driver.run(self.tokens[sequence][:length]))
        return self._expected[key]


def opened(folder: Path, kv: KvCacheDtype, options: BackendOptions) -> Backend:
    return open_backend(
        resolve_model(str(folder)),
        BackendOptions(
            device="emulated", plan=options.plan, capture_sizes=options.capture_sizes,
            kv_cache_dtype=kv, block_size=8, kv_cache_memory=1 << 21, threads=1,
            max_num_seqs=4, max_num_batched_tokens=64,
        ),
    )  # fmt: skip


def bits(logits: NDArray[np.float32]) -> Bits:
    return logits.view(np.uint32)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    with tempfile.TemporaryDirectory() as folder:
        yield Model(request.param, Path(folder))


# Steps of chunks: for each of the four sequences, how many of its tokens a step takes (0: none).
STEPS = st.lists(
    st.tuples(*[st.one_of(st.just(0), st.just(1), st.integers(1, 30)) for _ in range(4)]),
    min_size=1,
    max_size=8,
)


@settings(max_examples=15)
@given(steps=STEPS, order=st.permutations(range(4)))
def test_company_chunks_and_graphs_do_not_matter(
    model: Model, steps: list[tuple[int, ...]], order: list[int]
) -> None:
    driver = StepDriver(model.graphs)
    sequences = [DrivenSequence() for _ in range(4)]
    for step in steps:
        rows = []
        taken = []
        for i in order:
            start = sequences[i].computed
            stop = min(start + step[i], LENGTH)
            if stop > start:
                rows.append((sequences[i], model.tokens[i][start:stop]))
                taken.append((i, stop))
        if not rows:
            continue
        for got, (i, length) in zip(driver.step(rows), taken, strict=True):
            np.testing.assert_array_equal(bits(got), model.expected(i, length))


@settings(max_examples=8)
@given(shared=st.integers(1, 4), cut=st.integers(1, 12))
def test_a_prefix_that_is_there_already_does_not_matter(
    model: Model, shared: int, cut: int
) -> None:
    """Full blocks of another sequence with the same tokens, which goes on meanwhile."""
    driver = StepDriver(model.graphs)
    tokens, owner = model.tokens[0], DrivenSequence()
    driver.step([(owner, tokens[: shared * 8 + 3])])
    reader = DrivenSequence(shared * 8, owner.blocks[:shared])
    for start in range(shared * 8, LENGTH, cut):
        stop = min(start + cut, LENGTH)
        rows = [(reader, tokens[start:stop])]
        if owner.computed < LENGTH:
            rows.append((owner, tokens[owner.computed : owner.computed + 1]))
        got = driver.step(rows)
        np.testing.assert_array_equal(bits(got[0]), model.expected(0, stop))
