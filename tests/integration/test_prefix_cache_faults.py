"""Reported faults of prefix caches (R30, R61, R66): scheduler, batch, sampler and native plan as
they are, a tiny model, no processes. Over gRPC: tests/e2e/test_cache_and_scheduling.py.
"""

import math
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from real_core import Answer, CoreShape, RealCore, spoil
from scripted_models import write_m2_random_llama
from triptych.engine_core.errors import NotFinite, QueueFull
from triptych.engine_core.ids import RequestId
from triptych.engine_core.request import Request
from triptych.engine_core.sampling_params import NO_LOGPROBS, SamplingParams
from triptych.services.executor.backend import Backend, BackendOptions, Logits, open_backend
from triptych.services.executor.step_inputs import StepInputs
from triptych.services.runtime.model_files import resolve_model

VOCABULARY = 320
BLOCK = 16
EDGES = [15, 16, 17, 31, 32, 33]
TEXT = np.random.default_rng(1).integers(0, VOCABULARY, 64).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("m2") / "model"
    write_m2_random_llama(path, max_position_embeddings=128)
    return path


@pytest.fixture(scope="module")
def backend(folder: Path) -> Backend:
    options = BackendOptions(plan="native", kv_cache_memory=1 << 20, kv_cache_dtype="float32")
    return open_backend(resolve_model(str(folder)), options)


def cold(backend: Backend, shape: CoreShape | None = None) -> RealCore:
    spoil(backend)
    return RealCore(backend, shape or CoreShape())


def request(prompt: Sequence[int], number: int = 0, **params: int | float) -> Request:
    wanted = {"max_tokens": 4, "temperature": 0.0, **params}
    return Request(RequestId(number), tuple(prompt), SamplingParams(**wanted))  # type: ignore[arg-type]  # fields of several types


def one(core: RealCore, wanted: Request) -> Answer:
    return core.run([wanted])[wanted.request_id]


# ------------------------------------------------------------------ R61


def test_r61_every_length_twice(backend: Backend) -> None:
    """Nothing is left to compute but the last token, and that is computed."""
    core = cold(backend)
    for length in range(1, 51):
        prompt = [(token + length) % VOCABULARY for token in TEXT[:length]]
        first = one(core, request(prompt, logprobs=2))
        again = one(core, request(prompt, logprobs=2))
        assert again == first == one(cold(backend), request(prompt, logprobs=2))
        assert first.cached_tokens == 0
        assert again.cached_tokens == length - 1
        core.assert_empty()


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 32, 33, 47, 48, 49])
@pytest.mark.parametrize("tokens", [512, 8])
def test_r61_then_otherwise(backend: Backend, length: int, tokens: int) -> None:
    """The second time with another max_tokens, or with two choices."""
    shape = CoreShape(max_num_seqs=8, max_num_batched_tokens=tokens)
    core = cold(backend, shape)
    prompt = TEXT[:length]
    one(core, request(prompt))
    longer = one(core, request(prompt, max_tokens=9, logprobs=0))
    assert longer == one(cold(backend), request(prompt, max_tokens=9, logprobs=0))
    two = request(prompt, n=2, temperature=1.0, seed=3, logprobs=0)
    answers = dict(core.run([two]))
    assert answers == cold(backend).run([two])
    assert [answer.cached_tokens for answer in answers.values()] == [length - 1] * 2
    core.assert_empty()


def test_r61_lengths_interleaved(backend: Backend) -> None:
    """All beginnings of one text at once, long ones first and short ones first."""
    requests = [request(TEXT[:length], length, logprobs=1) for length in range(1, 51)]
    expected = {each.request_id: one(cold(backend), each) for each in requests}
    for order in (requests, requests[::-1]):
        core = cold(backend, CoreShape(max_num_batched_tokens=24))
        assert core.run(order, arrivals=[at // 4 for at in range(50)]) == expected
        assert core.run(order) == expected
        core.assert_empty()


# ------------------------------------------------------------------ R30


def reference_logprobs(folder: Path, prompt: Sequence[int]) -> list[float]:
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.inference_mode():
        logits = model(torch.tensor([list(prompt)])).logits[0].double()
    rows = torch.log_softmax(logits, dim=-1)
    return [float(rows[at, token]) for at, token in enumerate(prompt[1:])]


@pytest.mark.parametrize("length", EDGES)
def test_r30_prompt_logprobs_cold_warm_chunked(folder: Path, backend: Backend, length: int) -> None:
    wanted = request(TEXT[:length], prompt_logprobs=1, logprobs=1)
    expected = one(cold(backend), wanted)
    values = [struct.unpack("<d", each.logprob)[0] for each in expected.prompt_logprobs]
    np.testing.assert_allclose(values, reference_logprobs(folder, TEXT[:length]), atol=2e-4)
    for tokens, extra in ((512, 32), (8, 32), (8, 0), (64, 3)):
        shape = CoreShape(max_num_seqs=4, max_num_batched_tokens=tokens, extra_logits=extra)
        core = cold(backend, shape)
        one(core, request([*TEXT[: length - 3], 9, 9, 9, 9]))
        assert one(core, wanted) == expected, "after an overlapping prompt"
        assert one(core, request(TEXT[:length])).cached_tokens >= length - 3
        assert one(core, wanted) == expected, "the second time"
        core.assert_empty()


def test_r30_in_company(backend: Backend) -> None:
    """Some want logprobs of their prompts, some do not; prompts are equal or overlap."""
    kinds = [(length, scored) for length in EDGES for scored in (NO_LOGPROBS, 0, 1)]
    requests = [
        request(TEXT[:length], number, prompt_logprobs=scored)
        for number, (length, scored) in enumerate(kinds)
    ]
    expected = {each.request_id: one(cold(backend), each) for each in requests}
    core = cold(backend, CoreShape(max_num_seqs=6, max_num_batched_tokens=20, extra_logits=3))
    assert core.run(requests) == expected
    assert core.run(requests[::-1]) == expected
    core.assert_empty()


def test_r30_aborted_in_the_middle_of_its_chunks(backend: Backend) -> None:
    core = cold(backend, CoreShape(max_num_seqs=4, max_num_batched_tokens=8))
    wanted = request(TEXT[:33], prompt_logprobs=1)
    for steps in range(1, 6):
        core.submit(wanted)
        for _ in range(steps):
            core.step()
        assert 0 < len(core.answers[wanted.request_id].prompt_logprobs) < 33
        assert core.abort(wanted.request_id)
        core.assert_empty()
    assert one(core, wanted) == one(cold(backend), wanted)


# ------------------------------------------------------------------ R66


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("tokens", [8, 64])
def test_r66_200_equal_prompts_at_once(backend: Backend, tokens: int, caching: bool) -> None:
    """A block is found only when the step that fills it is over; nobody fills another's."""
    prompt = TEXT[:48]
    expected = one(cold(backend), request(prompt, logprobs=0))
    shape = CoreShape(max_num_seqs=8, max_num_batched_tokens=tokens, prefix_caching=caching)
    core = cold(backend, shape)
    requests = [request(prompt, number, logprobs=0) for number in range(200)]
    answers = core.run(requests)
    assert len(answers) == 200
    assert all(answer == expected for answer in answers.values())
    cached = sorted(answer.cached_tokens for answer in answers.values())
    if caching:
        assert cached == [0] + [47] * 199, "one computes the prompt, the others wait for it"
    else:
        assert cached == [0] * 200
    core.assert_empty()


def test_r66_2000_tiny_requests(backend: Backend) -> None:
    """Beyond the bound they are refused; the others are answered in the order they came in."""
    core = cold(backend, CoreShape(max_num_seqs=16, max_num_waiting=1000, policy="fcfs"))
    refused = 0
    order: list[RequestId] = []
    for number in range(2000):
        try:
            core.submit(request([number % VOCABULARY], number, max_tokens=1))
        except QueueFull:
            refused += 1
    while core.step():
        order += [number for number in core.answers if core.answers[number].finish][len(order) :]
    assert refused == 2000 - 1016
    assert order == sorted(order)
    assert [answer.finish for answer in core.answers.values()] == ["LENGTH"] * 1016
    for number in (0, 319, 320, 1015):
        same = one(cold(backend), request([number % VOCABULARY], max_tokens=1))
        assert core.answers[RequestId(number)] == same
    core.assert_empty()


# ------------------------------------------------------------------ what is broken is not shared


class BreaksOnce:
    """A backend one step of which gives numbers that are not finite."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.facts = backend.facts
        self.broken = False

    def reserve(self, max_tokens: int) -> None:
        self._backend.reserve(max_tokens)

    def execute(self, inputs: StepInputs, logits: Logits) -> None:
        self._backend.execute(inputs, logits)
        if self.broken:
            logits[: inputs.num_logits] = math.nan
            self.broken = False


def test_a_failed_request_leaves_nothing_in_the_cache(backend: Backend) -> None:
    """Its logits were not finite, so its keys and values may not be either."""
    flawed = BreaksOnce(backend)
    spoil(backend)
    core = RealCore(flawed, CoreShape())
    flawed.broken = True
    wanted = request(TEXT[:40])
    failed = one(core, wanted)
    assert failed.finish.startswith(NotFinite.__name__)
    again = one(core, wanted)
    assert again == one(cold(backend), wanted)
    assert again.cached_tokens == 0
    core.assert_empty()
