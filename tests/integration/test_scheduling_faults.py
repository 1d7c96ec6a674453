"""Reported faults of scheduling and sampling (R23, R24, R64, R65): scheduler, batch, sampler and
native plan as they are, small models, no processes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from real_core import Answer, CoreShape, RealCore, choices_of, spoil
from request_mixes import PROCESSORS
from scripted_models import write_m2_random_llama, write_s1_markov
from triptych.engine_core.ids import RequestId
from triptych.engine_core.request import Request
from triptych.engine_core.sampling_params import BeamParams, SamplingParams
from triptych.services.executor.backend import Backend, BackendOptions, open_backend
from triptych.services.runtime.model_files import resolve_model

V = 64
X, Y, START = 7, 8, 9
Answers = dict[RequestId, Answer]


def open_model(folder: Path, kv_cache_memory: int = 1 << 20) -> Backend:
    options = BackendOptions(plan="native", kv_cache_memory=kv_cache_memory)
    return open_backend(resolve_model(str(folder)), options)


@pytest.fixture(scope="module")
def markov(tmp_path_factory: pytest.TempPathFactory) -> Backend:
    """After anything: X half of the time, Y and START a quarter each."""
    folder = tmp_path_factory.mktemp("s1") / "model"
    table = np.zeros((V, V))
    table[:, [X, Y, START]] = [0.5, 0.25, 0.25]
    write_s1_markov(folder, table, max_position_embeddings=128)
    return open_model(folder)


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Backend:
    folder = tmp_path_factory.mktemp("m2") / "model"
    write_m2_random_llama(folder, max_position_embeddings=128)
    return open_model(folder)


def core_of(backend: Backend, shape: CoreShape | None = None) -> RealCore:
    spoil(backend)
    return RealCore(backend, shape or CoreShape(), processors=PROCESSORS)


def request(prompt: list[int], number: int = 0, **params: Any) -> Request:
    return Request(RequestId(number), tuple(prompt), SamplingParams(**params))


def alone(backend: Backend, requests: list[Request]) -> Answers:
    answers: Answers = {}
    for each in requests:
        answers |= core_of(backend).run([each])
    return answers


# ------------------------------------------------------------------ R23

PENALTIES: list[dict[str, Any]] = [
    {"presence_penalty": 1.0}, {"frequency_penalty": 1.0}, {"repetition_penalty": 2.0},
]  # fmt: skip


def with_penalty(logits: dict[int, float], params: dict[str, float], output: list[int]) -> None:
    """OpenAI's formula over the output, Hugging Face's over prompt and output; in place."""
    penalty = params.get("repetition_penalty", 1.0)
    for token, logit in logits.items():
        count = output.count(token)
        if token == X or count:
            logits[token] = logit / penalty if logit > 0 else logit * penalty
        logits[token] -= params.get("frequency_penalty", 0.0) * count
        logits[token] -= params.get("presence_penalty", 0.0) * (count > 0)


def run_whole(core: RealCore, wanted: Request) -> Answer:
    return core.run([wanted])[wanted.request_id]


def run_after_hit(core: RealCore, wanted: Request) -> Answer:
    core.run([wanted])
    answer = core.run([wanted])[wanted.request_id]
    assert answer.cached_tokens > 0
    return answer


def run_after_loss(core: RealCore, wanted: Request) -> Answer:
    """In the middle of its output everything is computed anew, output as well as prompt."""

    def lose(core: RealCore, step: int) -> None:
        if step in (2, 4):
            assert core.lose_executor()

    return core.run([wanted], between=lose)[wanted.request_id]


@pytest.mark.parametrize("params", PENALTIES, ids=str)
@pytest.mark.parametrize("run", [run_whole, run_after_hit, run_after_loss])
@pytest.mark.parametrize("tokens", [512, 4])
def test_r23_penalties_count_what_they_are_to(
    markov: Backend,
    params: dict[str, Any],
    run: Callable[[RealCore, Request], Answer],
    tokens: int,
) -> None:
    """The prompt has X five times; X and Y are forced, so that step 3 has counts of both."""
    shape = CoreShape(max_num_seqs=4, max_num_batched_tokens=tokens, processed_logprobs=True)
    core = core_of(markov, shape)
    prompt = [START + 1, X, X, X, X, X]
    wanted = request(prompt, max_tokens=4, seed=5, logprobs=V, **params)
    answer = run(core, wanted)
    assert len(answer.values) == 4
    for step, found in enumerate(answer.values):
        logits = {X: np.log(0.5), Y: np.log(0.25), START: np.log(0.25)}
        with_penalty(logits, params, answer.token_ids[:step])
        total = np.logaddexp.reduce(list(logits.values()))
        got = dict(zip(found.top_ids, found.top_logprobs, strict=True))
        for token, logit in logits.items():
            assert got[token] == pytest.approx(logit - total, abs=1e-4)


# ------------------------------------------------------------------ R24

DIFFERENT: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.0, "frequency_penalty": 2.0},
    {"temperature": 0.7, "top_k": 5, "seed": 2, "repetition_penalty": 1.8},
    {"temperature": 1.5, "top_p": 0.7, "seed": 3, "presence_penalty": -1.5, "min_tokens": 6},
    {"temperature": 1.0, "min_p": 0.2, "typical_p": 0.8, "seed": 4, "logit_bias": ((3, 9.0),)},
    {"temperature": 1.0, "allowed_token_ids": tuple(range(40)), "seed": 5},
    {"temperature": 2.0, "seed": 6, "no_repeat_ngram_size": 1, "processors": (("favour", "5"),)},
]


@pytest.mark.parametrize("tokens", [512, 11])
def test_r24_a_distribution_depends_on_its_request_only(random_model: Backend, tokens: int) -> None:
    """Very different parameters, prompts of different lengths, in five orders."""
    rng = np.random.default_rng(8)
    requests = [
        request(rng.integers(0, 320, 3 + 4 * number).tolist(), number, max_tokens=12,
                logprobs=2, **params)
        for number, params in enumerate(DIFFERENT)
    ]  # fmt: skip
    expected = alone(random_model, requests)
    assert len({tuple(answer.token_ids) for answer in expected.values()}) == len(DIFFERENT)
    core = core_of(random_model, CoreShape(max_num_seqs=8, max_num_batched_tokens=tokens))
    for order in range(5):
        Random(order).shuffle(requests)
        core.scheduler.forget_cache()
        assert core.run(requests) == expected
        core.assert_empty()


# ------------------------------------------------------------------ R64


def test_r64_preempted_as_if_never(random_model: Backend) -> None:
    """Eight times 60 tokens in a pool for three: nothing doubled, lost, recounted or drawn anew."""
    rng = np.random.default_rng(9)
    requests = [
        request(rng.integers(0, 320, 20).tolist(), 10 * number,
                **(DIFFERENT[number] | {"max_tokens": 60, "min_tokens": 0, "logprobs": 1}))
        for number in range(8)
    ]  # fmt: skip
    scored = replace(requests[7].params, prompt_logprobs=1, n=2)
    requests[7] = replace(requests[7], params=scored)
    expected: Answers = {}
    for each in requests:
        expected |= core_of(random_model).run([each])
    for policy in ("fcfs", "priority", "shortest-prefill", "fair"):
        shape = CoreShape(num_blocks=15, max_num_seqs=9, max_num_batched_tokens=64, policy=policy)
        core = core_of(random_model, shape)
        first_done: list[int] = []

        def note(core: RealCore, step: int, done: list[int] = first_done) -> None:
            ended = [number for number, answer in core.answers.items() if answer.finish]
            done += [number for number in ended if number not in done]

        assert core.run(requests, between=note) == expected
        assert core.scheduler.preemptions_total > 0
        assert core.steps < 8 * 60 * 3, (
            "those that lose their blocks do not keep each other from it"
        )
        if policy == "fcfs":
            assert first_done[0] == 0, "the first is never preempted"
        core.assert_empty()


# ------------------------------------------------------------------ R65


def many_kinds(source: Random, number: int) -> Request:
    kind = source.randrange(6)
    prompt = [source.randrange(320) for _ in range(source.randint(1, 40))]
    if kind == 0:
        prompt = list(range(40))
    params: dict[str, Any] = {"max_tokens": source.randint(1, 20), "seed": number}
    if kind == 1:
        params["n"] = 3
    if kind == 2:
        params |= {"max_tokens": 6, "beam": BeamParams(width=2)}
    if kind == 3:
        params["prompt_logprobs"] = 1
    return request(prompt, 100 * number, **params)


@pytest.mark.parametrize(("impl", "count"), [("native", 500), ("python", 100)])
def test_r65_cancelled_in_any_state(random_model: Backend, impl: Any, count: int) -> None:
    """Of the requests half are cancelled: queued, prefilling, running, preempted, in flight; twice;
    some choices of three; unknown ids. Everything comes back, and the others notice nothing."""
    source = Random(65)
    shape = CoreShape(
        num_blocks=9, max_num_seqs=6, max_num_batched_tokens=24, extra_logits=2, impl=impl
    )
    core = core_of(random_model, shape)
    requests = [many_kinds(source, number) for number in range(count)]
    waiting = list(requests)
    doomed = {c for each in requests[::2] for c in choices_of(each) if source.random() < 0.8}
    cancelled: set[RequestId] = set()

    def cancel_some() -> None:
        alive = [c for c in doomed - cancelled if c in core.answers and not core.answers[c].finish]
        for choice in source.sample(sorted(alive), min(len(alive), source.randint(0, 2))):
            length = len(core.answers[choice].token_ids)
            assert core.abort(choice)
            assert not core.abort(choice), "the second time there is nothing"
            cancelled.add(choice)
            lengths[choice] = length
        assert not core.abort(RequestId(10**6))

    lengths: dict[RequestId, int] = {}
    while waiting or core.scheduler.num_requests:
        for _ in range(source.randint(0, 3)):
            if waiting:
                core.submit(waiting.pop(0))
        cancel_some()
        plan = core.begin()
        cancel_some()
        if plan:
            core.end(plan)
        core.scheduler.check()
    for choice in cancelled:
        answer = core.answers[choice]
        assert not answer.finish
        assert len(answer.token_ids) == lengths[choice], "nothing comes after a cancel"
    assert len(cancelled) > count // 5
    assert core.scheduler.preemptions_total > 0
    core.assert_empty()
    fresh = alone(random_model, requests[1::20])
    for choice, expected in fresh.items():
        assert core.answers[choice] == expected
    last = request([1, 2, 3], 10**7, max_tokens=8, seed=1)
    assert core.run([last]) == alone(random_model, [last])
