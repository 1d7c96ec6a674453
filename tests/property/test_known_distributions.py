"""Sampling where the answer can be written down: S1's logits are a table, whatever came before.

What is drawn from must follow the formulas of docs/sampling.md at every step, however the prompt
was cut, whether it came from the cache, and after preemptions (reported faults R23, R24).
"""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mix_runs import least_blocks
from real_core import CoreShape, RealCore, choices_of, spoil
from request_mixes import PROCESSORS, World, favour, random_mix
from scripted_models import LOGIT_OF_ZERO, write_s1_markov
from triptych.engine_core.ids import RequestId
from triptych.engine_core.request import Request
from triptych.engine_core.sampling_params import SamplingParams
from triptych.services.executor.backend import Backend, BackendOptions, open_backend
from triptych.services.runtime.model_files import resolve_model

Row = npt.NDArray[np.float64]

V = 64
FEW = 6
"""Of the tokens that may follow each one."""


def table() -> Row:
    """After each token a few others, none of them rare."""
    rng = np.random.default_rng(11)
    rows = np.zeros((V, V))
    for row in rows:
        row[rng.choice(V, FEW, replace=False)] = 0.1 + rng.random(FEW)
    rows /= rows.sum(axis=1, keepdims=True)
    return rows


TABLE = table()
WORLD = World(
    texts=[np.random.default_rng(seed).integers(0, top, 96).tolist() for seed, top in
           ((1, V), (2, V), (3, 4))],
    vocabulary_size=V, stop_ids=range(8), max_output=20, max_beams=0, usual=0.3,
    # Where two values are nearly equal, these filters go by rounding.
    fields={"top_p": 0.0, "typical_p": 0.0, "top_n_sigma": 0.0, "logprobs": 0.0},
)  # fmt: skip


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        write_s1_markov(path, TABLE, max_position_embeddings=160)
        yield open_backend(
            resolve_model(str(path)), BackendOptions(plan="native", kv_cache_memory=1 << 21)
        )


def expected_logprobs(request: Request, output: list[int]) -> Row:
    """Of the next token of a choice, by the formulas; float64 [V], -inf for what cannot come."""
    params, prompt = request.params, request.prompt_token_ids
    history = [*prompt, *output]
    logits = np.full(V, LOGIT_OF_ZERO)
    probabilities = TABLE[history[-1]]
    logits[probabilities > 0] = np.log(probabilities[probabilities > 0])
    for _, argument in params.processors:
        changed = logits.astype(np.float32)
        favour(argument)(prompt, output, changed)
        logits = changed.astype(np.float64)
    logits[list(_forbidden(params, prompt, output))] = -np.inf
    for token, bias in params.logit_bias:
        logits[token] += bias
    repeated = list(set(history))
    penalty = params.repetition_penalty
    logits[repeated] = np.where(
        logits[repeated] > 0, logits[repeated] / penalty, logits[repeated] * penalty
    )
    for token in set(output):
        count = output.count(token)
        logits[token] -= params.frequency_penalty * count + params.presence_penalty
    if params.temperature > 0:
        logits = _filtered(params, logits / params.temperature)
    best = logits.max()
    logprobs: Row = logits - best - np.log(np.exp(logits - best).sum())
    return logprobs


def _forbidden(params: SamplingParams, prompt: tuple[int, ...], output: list[int]) -> set[int]:
    banned: set[int] = set()
    if params.allowed_token_ids is not None:
        banned |= set(range(V)) - set(params.allowed_token_ids)
    for *front, last in params.bad_words:
        if not front or output[-len(front) :] == front:
            banned.add(last)
    size, history = params.no_repeat_ngram_size, [*prompt, *output]
    if size:
        ending = history[len(history) - size + 1 :]
        for at in range(len(history) - size + 1):
            if history[at : at + size - 1] == ending:
                banned.add(history[at + size - 1])
    if len(output) < params.min_tokens:
        banned |= set(params.stop_token_ids)
    return banned


def _filtered(params: SamplingParams, logits: Row) -> Row:
    order = np.argsort(-logits, kind="stable")
    kept = order[: params.top_k] if params.top_k > 0 else order
    probabilities = np.exp(logits - logits.max())
    left = [token for token in kept if probabilities[token] >= params.min_p]
    out = np.full(V, -np.inf)
    out[left] = logits[left]
    return out


def with_all_logprobs(request: Request) -> Request:
    return replace(request, params=replace(request.params, logprobs=V))


def assert_as_written_down(core: RealCore, requests: list[Request]) -> int:
    """Every position's distribution; how many positions."""
    positions = 0
    for request in requests:
        for choice in choices_of(request):
            answer = core.answers[choice]
            for at, (token_id, found) in enumerate(
                zip(answer.token_ids, answer.values, strict=True)
            ):
                expected = expected_logprobs(request, answer.token_ids[:at])
                assert expected[token_id] > -np.inf
                likely = np.flatnonzero(expected > -25).tolist()
                got = dict(zip(found.top_ids, found.top_logprobs, strict=True))
                assert [got[token] for token in likely] == pytest.approx(
                    expected[likely].tolist(), abs=1e-4, rel=1e-5
                )
                assert found.logprob == pytest.approx(expected[token_id], abs=1e-4, rel=1e-5)
                positions += 1
    return positions


@settings(max_examples=40)
@given(
    source=st.randoms(use_true_random=False),
    tokens=st.sampled_from([7, 16, 64, 512]),
    small=st.booleans(),
)
def test_every_distribution_is_the_formulas(
    backend: Backend, source: Random, tokens: int, small: bool
) -> None:
    requests = [with_all_logprobs(request) for request in random_mix(source, WORLD)]
    room = least_blocks(requests, backend.facts.block_size)
    shape = CoreShape(
        num_blocks=room if small else None, max_num_seqs=7, max_num_batched_tokens=tokens,
        processed_logprobs=True,
    )  # fmt: skip
    spoil(backend, V - 1)
    core = RealCore(backend, shape, processors=PROCESSORS)
    for _ in range(2):  # the second time with what the first one left in the cache
        core.run(requests, arrivals=[source.randint(0, 3) for _ in requests])
        assert_as_written_down(core, requests)
        core.assert_empty()


SHAPES = {
    "whole prompts": CoreShape(max_num_seqs=64),
    "chunks of 7": CoreShape(max_num_seqs=7, max_num_batched_tokens=7),
    "preempted": CoreShape(max_num_seqs=32, num_blocks=9, max_num_batched_tokens=32),
}


@pytest.mark.parametrize("name", SHAPES)
def test_draws_follow_the_table(backend: Backend, name: str) -> None:
    """1,024 choices of the first and the second token, by chi-square against the table."""
    core = RealCore(backend, SHAPES[name])
    prompt = tuple(WORLD.texts[0][:47])
    requests = [
        Request(
            request_id=RequestId(1000 * seed),
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=3, seed=seed, n=128),
        )
        for seed in range(8)
    ]
    core.run(requests)
    first, second = np.zeros(V), np.zeros((V, V))
    for answer in core.answers.values():
        first[answer.token_ids[0]] += 1
        second[answer.token_ids[0], answer.token_ids[1]] += 1
    assert first.sum() == 1024
    # Chi-square with 5 degrees of freedom is above 20.5 in one of a thousand, with 35 above 66.6.
    assert chi_square(first, 1024 * TABLE[prompt[-1]]) < 20.5
    assert chi_square(second, 1024 * TABLE[prompt[-1]][:, None] * TABLE) < 66.6
    if name == "preempted":
        assert core.scheduler.preemptions_total > 0
    assert core.batch.prefix_hits_total > 0
    core.assert_empty()


def chi_square(counts: Row, expected: Row) -> float:
    """Infinite when something happened that cannot."""
    assert not counts[expected == 0].any()
    possible = expected > 0
    return float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
