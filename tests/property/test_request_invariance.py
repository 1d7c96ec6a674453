"""What a request gets depends on nothing but the request; on a tiny model, over any mix.

`scripts/invariance.py` does the same with the real model and more of everything.
"""

import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mix_runs import (
    Bench,
    Mix,
    Variant,
    after_overlapping,
    check,
    chunked,
    executor_lost,
    plain_twins,
    preempted,
    reduced,
    resumed,
    seeded_mix,
    speculative,
    threaded,
    together,
    without_cache,
)
from request_mixes import World, random_mix
from scripted_models import write_m2_random_llama
from triptych.services.executor.backend import Backend, BackendOptions, Logits, open_backend
from triptych.services.executor.step_inputs import StepInputs
from triptych.services.runtime.model_files import resolve_model

VOCABULARY = 96
SAMPLEABLE = 90
SEED = st.integers(0, 2**32 - 1)
RANDOMS = st.randoms(use_true_random=False)


def texts() -> list[list[int]]:
    """Half of them of few different tokens, so that words and n-grams come again."""
    rng = np.random.default_rng(5)
    return [rng.integers(0, top, 96).tolist() for top in (SAMPLEABLE, SAMPLEABLE, 6, 3)]


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        write_m2_random_llama(
            path, vocab_size=VOCABULARY, hidden_size=64, num_attention_heads=4,
            max_position_embeddings=160,
        )  # fmt: skip
        single, double = (
            open_backend(
                resolve_model(str(path)),
                BackendOptions(plan="native", kv_cache_memory=1 << 21, threads=threads),
            )
            for threads in (1, 2)
        )
        world = World(
            texts=texts(), vocabulary_size=SAMPLEABLE, stop_ids=range(6), usual=0.3, max_output=20
        )
        yield Bench(single, double, world, SAMPLEABLE)


def assert_invariant(bench: Bench, source: Random, seed: int, *variants: Variant) -> Counter[str]:
    seen: Counter[str] = Counter()
    mix = Mix(random_mix(source, bench.world), seed)
    assert check(bench, mix, seen, variants) is None
    return seen


@settings(max_examples=40)
@given(source=RANDOMS, seed=SEED)
def test_company_and_a_warm_cache(bench: Bench, source: Random, seed: int) -> None:
    assert_invariant(bench, source, seed, together, after_overlapping)


@settings(max_examples=40)
@given(source=RANDOMS, seed=SEED)
def test_chunks_arrivals_and_departures(bench: Bench, source: Random, seed: int) -> None:
    assert_invariant(bench, source, seed, chunked)


@settings(max_examples=40)
@given(source=RANDOMS, seed=SEED)
def test_preemption_and_the_loss_of_the_executor(bench: Bench, source: Random, seed: int) -> None:
    assert_invariant(bench, source, seed, preempted, executor_lost, resumed)


@settings(max_examples=15)
@given(source=RANDOMS, seed=SEED)
def test_threads_twins_and_no_cache(bench: Bench, source: Random, seed: int) -> None:
    assert_invariant(bench, source, seed, threaded, plain_twins, without_cache)


@settings(max_examples=30)
@given(source=RANDOMS, seed=SEED)
def test_drafts(bench: Bench, source: Random, seed: int) -> None:
    assert_invariant(bench, source, seed, speculative)


def test_the_mixes_have_what_they_are_to_show(bench: Bench) -> None:
    seen: Counter[str] = Counter()
    for seed in range(12):
        assert check(bench, seeded_mix(seed, bench.world), seen) is None
    for what in (
        "preemptions", "tokens from a warm cache", "tokens from overlapping prompts",
        "choices aborted in flight", "executors lost",
        "choices resumed", "end: STOP", "end: LENGTH",
        "positions with logprobs", "drafts computed", "drafts taken",
    ):  # fmt: skip
        assert seen[what] > 0, what


class Sociable:
    """A backend whose last row depends, by very little, on whether it is alone."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.facts = backend.facts

    def reserve(self, max_tokens: int) -> None:
        self._backend.reserve(max_tokens)

    def execute(self, inputs: StepInputs, logits: Logits) -> None:
        self._backend.execute(inputs, logits)
        if inputs.num_logits > 1:
            logits[inputs.num_logits - 1] *= np.float32(1 + 2**-22)


def test_a_difference_is_seen_and_reduced(bench: Bench) -> None:
    """The comparison itself."""
    flawed = replace(bench, single=Sociable(bench.single))
    mix = seeded_mix(3, bench.world)
    found = check(flawed, mix, Counter(), [together])
    assert found is not None
    assert found.variant == "batched, 512 tokens a step"
    smaller, again = reduced(flawed, mix, found, [together])
    assert again is not None
    assert 1 <= len(smaller.requests) < len(mix.requests)
