"""A token's logits do not depend on its company, on how its prompt was cut, on threads or kernels.

Bit for bit. Sequences are run alone and whole by one backend; then any mix of chunks of them, in
any order, by another.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sampler_cases import using_isa
from step_driver import DrivenSequence, StepDriver
from tiny_models import save, tiny_model, write_gguf
from triptych.kernels import cpu
from triptych.services.executor.activation_precision import ActivationDtype
from triptych.services.executor.backend import Backend, BackendOptions, KvCacheDtype, open_backend
from triptych.services.runtime.model_files import resolve_model

Bits = NDArray[np.uint32]

LENGTH = 96
VOCABULARY = 96
SIZES: dict[str, object] = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4}
MODELS: dict[str, tuple[str, dict[str, object], str, KvCacheDtype, ActivationDtype]] = {
    "Q4_1": ("llama", SIZES, "Q4_1", "auto", "auto"),
    "Q4_1 int16": ("llama", SIZES, "Q4_1", "auto", "int16"),
    "Q5_0 int8": ("llama", SIZES, "Q5_0", "auto", "int8"),
    "Q8_0": ("qwen2", SIZES, "Q8_0", "int8", "auto"),
    "Q8_0 int8": ("llama", SIZES, "Q8_0", "float32", "int8"),
    "F16": ("llama", {}, "F16", "float32", "auto"),
    "BF16": ("llama", {"num_key_value_heads": 1}, "BF16", "auto", "auto"),
}


class Twins:
    """A model opened twice, with one thread and with three, and what each sequence should give."""

    def __init__(self, name: str, folder: Path) -> None:
        family, sizes, kind, kv, activations = MODELS[name]
        path = folder / f"{kind}.gguf"
        write_gguf(tiny_model(family, sizes), path, type_of=lambda _: kind)
        self.single, self.threaded = (
            open_backend(
                resolve_model(str(path)),
                BackendOptions(
                    plan="native",
                    kv_cache_dtype=kv,
                    activation_dtype=activations,
                    kv_cache_memory=1 << 22,
                    threads=threads,
                ),
            )
            for threads in (1, 3)
        )
        rng = np.random.default_rng(3)
        self.tokens = [rng.integers(0, VOCABULARY, LENGTH).tolist() for _ in range(4)]
        self._expected: dict[tuple[int, int], Bits] = {}

    def expected(self, sequence: int, length: int) -> Bits:
        """Bits behind the first `length` tokens of a sequence: alone, whole, one thread."""
        key = sequence, length
        if key not in self._expected:
            driver = StepDriver(self.single)
            self._expected[key] = bits(driver.run(self.tokens[sequence][:length]))
        return self._expected[key]


def bits(logits: NDArray[np.float32]) -> Bits:
    return logits.view(np.uint32)


@pytest.fixture(scope="module", params=MODELS)
def twins(request: pytest.FixtureRequest) -> Iterator[Twins]:
    with tempfile.TemporaryDirectory() as folder:
        yield Twins(request.param, Path(folder))


# Steps of chunks: for each of the four sequences, how many of its tokens a step takes (0: none).
STEPS = st.lists(
    st.tuples(*[st.one_of(st.just(0), st.just(1), st.integers(1, 50)) for _ in range(4)]),
    min_size=1,
    max_size=8,
)


@settings(max_examples=40)
@given(steps=STEPS, order=st.permutations(range(4)), isa=st.sampled_from(cpu.supported_isas()))
def test_company_chunks_threads_and_kernels_do_not_matter(
    twins: Twins, steps: list[tuple[int, ...]], order: list[int], isa: str
) -> None:
    driver = StepDriver(twins.threaded)
    sequences = [DrivenSequence() for _ in range(4)]
    with using_isa(isa):
        for step in steps:
            rows = []
            taken = []
            for i in order:
                start = sequences[i].computed
                stop = min(start + step[i], LENGTH)
                if stop > start:
                    rows.append((sequences[i], twins.tokens[i][start:stop]))
                    taken.append((i, stop))
            if not rows:
                continue
            for got, (i, length) in zip(driver.step(rows), taken, strict=True):
                np.testing.assert_array_equal(bits(got), twins.expected(i, length))


@pytest.mark.smollm
@settings(max_examples=4)
@given(cut=st.integers(1, 149), others=st.integers(1, 7))
def test_the_real_model(smollm_backends: tuple[Backend, Backend], cut: int, others: int) -> None:
    single, double = smollm_backends
    rng = np.random.default_rng(cut)
    tokens = rng.integers(0, 49152, 150).tolist()
    expected = bits(StepDriver(single).run(tokens))
    driver = StepDriver(double, max_tokens=512)
    company = [(DrivenSequence(), rng.integers(0, 49152, 20).tolist()) for _ in range(others)]
    sequence = DrivenSequence()
    driver.step([(sequence, tokens[:cut])])
    got = driver.step([*company, (sequence, tokens[cut:])])[-1]
    np.testing.assert_array_equal(bits(got), expected)


@pytest.fixture(scope="module")
def smollm_backends(smollm: Path) -> tuple[Backend, Backend]:
    one, two = (
        open_backend(
            resolve_model(str(smollm)),
            BackendOptions(plan="native", kv_cache_memory=64 << 20, threads=threads),
        )
        for threads in (1, 2)
    )
    return one, two


@pytest.mark.parametrize("window", [None, 100])
def test_partitions_of_long_sequences(window: int | None, tmp_path: Path) -> None:
    """More than 512 tokens: attention of a decoding row is split when there are threads for it."""
    sizes: dict[str, object] = {"max_position_embeddings": 2048}
    family = "llama" if window is None else "mistral"
    if window is not None:
        sizes["sliding_window"] = window
    path = tmp_path / "model"
    save(tiny_model(family, sizes), path)
    logits = []
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, 1101).tolist()
    for threads, cuts in ((1, [1101]), (4, [700, 1100, 1101]), (2, [1, 513, 1024, 1100, 1101])):
        options = BackendOptions(plan="native", kv_cache_memory=1 << 22, threads=threads)
        driver = StepDriver(open_backend(resolve_model(str(path)), options), max_tokens=1200)
        sequence = DrivenSequence()
        for start, stop in zip([0, *cuts], cuts, strict=False):
            last = driver.step([(sequence, tokens[start:stop])])
        logits.append(bits(last[0]))
    np.testing.assert_array_equal(logits[1], logits[0])
    np.testing.assert_array_equal(logits[2], logits[0])
