"""Sequences come and go: what a sampler keeps of them, and that they do not touch one another."""

import array
import mmap
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sampler_cases import random_logits
from sampler_sequences import BOTH, MakeSampler, random_params
from triptych.kernels.cpu.sampler import Sampler
from triptych.kernels.reference.sampler import Sampler as PlainSampler
from triptych.kernels.sampler_params import SamplerParams

# Eight sequences that have little in common (reported-faults R24).
MIX: list[tuple[SamplerParams, list[int]]] = [
    (SamplerParams(temperature=0.0), list(range(40))),
    (SamplerParams(temperature=0.0, frequency_penalty=2.0, presence_penalty=1.0), [3]),
    (SamplerParams(temperature=1.0, seed=1), []),
    (SamplerParams(temperature=1.0, seed=1, choice=1), []),
    (SamplerParams(temperature=0.7, top_k=5, top_p=0.8, seed=2, logprobs=3), [9] * 200),
    (SamplerParams(temperature=2.0, typical_p=0.5, min_p=0.01, seed=3), [1, 2]),
    (SamplerParams(repetition_penalty=1.5, no_repeat_ngram_size=2, top_n_sigma=1.0), [5, 6] * 9),
    (SamplerParams(allowed_token_ids=tuple(range(0, 300, 7)), logit_bias=((14, 2.0),),
                   bad_words=((7,), (14, 21)), masked_token_ids=(0,), mask_until=5), [8]),
]  # fmt: skip


def run(make: MakeSampler, members: list[int], steps: int) -> dict[int, list[int]]:
    """The tokens of some of the mix, run together in the given order on scripted logits."""
    sampler = make(300)
    outputs: dict[int, list[int]] = {member: [] for member in members}
    for member in members:
        sampler.open(member, MIX[member][0], MIX[member][1], [])
    for step in range(steps):
        rng = np.random.default_rng(step)
        logits = (rng.standard_normal((8, 310)) * 2).astype(np.float32)
        tokens = sampler.draw(logits, members, members).token_ids
        sampler.append(members, tokens)
        for member, token in zip(members, tokens.tolist(), strict=True):
            outputs[member].append(token)
    return outputs


@BOTH
def test_eight_very_different_sequences_alone_and_together(make: MakeSampler) -> None:
    alone = {i: run(make, [i], 12)[i] for i in range(8)}
    rng = np.random.default_rng(0)
    for _ in range(5):
        assert run(make, rng.permutation(8).tolist(), 12) == alone
    assert alone[2] != alone[3], "choices of one seed differ"


@BOTH
def test_samples_may_share_a_row(make: MakeSampler) -> None:
    sampler = make(50)
    for choice in range(30):
        sampler.open(choice, SamplerParams(choice=choice), [], [])
    logits = random_logits(np.random.default_rng(3), 2, 50)
    shared = sampler.draw(logits, range(30), [1] * 30).token_ids
    repeated = sampler.draw(np.tile(logits[1], (30, 1)), range(30), range(30)).token_ids
    np.testing.assert_array_equal(shared, repeated)
    assert len(set(shared.tolist())) > 5


@BOTH
def test_rows_beyond_the_tokenizer_do_not_matter(make: MakeSampler) -> None:
    """Never drawn, never counted: whatever a padded vocabulary has there, NaN too."""
    rng = np.random.default_rng(5)
    params = [random_params(rng, 200)._replace(logprobs=5) for _ in range(40)]
    answers = []
    logits = np.empty((40, 230), np.float32)
    logits[:, :200] = random_logits(rng, 40, 200)
    for filler in (np.nan, np.inf, 1e9, -np.inf):
        logits[:, 200:] = filler
        sampler = make(200, processed_logprobs=True)
        for i, each in enumerate(params):
            sampler.open(i, each, [1, 201], [229])
        answers.append(sampler.draw(logits, range(40), range(40)))
    for first, other in pairwise(answers):
        np.testing.assert_array_equal(first.token_ids, other.token_ids)
        assert {i: of[:2] for i, of in first.logprobs.items()} == {
            i: of[:2] for i, of in other.logprobs.items()
        }
    assert answers[0].token_ids.max() < 200


@BOTH
def test_a_sequence_that_goes_on_draws_what_it_would_have(make: MakeSampler) -> None:
    for member, (params, prompt) in enumerate(MIX):
        whole = run(make, [member], 10)[member]
        sampler = make(300)
        sampler.open(1, params, np.array(prompt, np.int32), array.array("i", whole[:9]))
        rng = np.random.default_rng(9)
        logits = (rng.standard_normal((8, 310)) * 2).astype(np.float32)
        assert sampler.draw(logits, [1], [member]).token_ids.tolist() == whole[9:]


@BOTH
def test_what_is_not_open(make: MakeSampler) -> None:
    sampler = make(5)
    sampler.open(1, SamplerParams(temperature=0.0, frequency_penalty=9.0), [], [])
    logits = np.arange(5, dtype=np.float32)[None]
    calls: list[Callable[[], object]] = [
        lambda: sampler.close(2),
        lambda: sampler.append([1, 2], [4, 4]),
        lambda: sampler.draw(logits, [1, 2], [0, 0]),
    ]
    for call in calls:
        with pytest.raises(KeyError):
            call()
    assert sampler.draw(logits, [1], [0]).token_ids.tolist() == [4], "nothing was appended"
    with pytest.raises(ValueError, match="1 is open"):
        sampler.open(1, SamplerParams(), [], [])
    sampler.close(1)
    assert sampler.open_sequences == 0
    sampler.open(1, SamplerParams(temperature=0.0), [], [])


@BOTH
@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplerParams(temperature=-0.5), "temperature"),
        (SamplerParams(temperature=float("nan")), "temperature"),
        (SamplerParams(temperature=float("inf")), "temperature"),
        (SamplerParams(top_p=1.5), "top_p"),
        (SamplerParams(min_p=float("nan")), "min_p"),
        (SamplerParams(typical_p=-0.1), "typical_p"),
        (SamplerParams(top_n_sigma=float("inf")), "top_n_sigma"),
        (SamplerParams(repetition_penalty=0.0), "repetition_penalty"),
        (SamplerParams(presence_penalty=float("nan")), "presence_penalty"),
        (SamplerParams(frequency_penalty=float("-inf")), "frequency_penalty"),
        (SamplerParams(logit_bias=((1, float("nan")),)), "logit_bias"),
        (SamplerParams(bad_words=((),)), "bad word"),
        (SamplerParams(no_repeat_ngram_size=-1), "no_repeat_ngram_size"),
        (SamplerParams(seed=-1), "seed"),
        (SamplerParams(seed=2**64), "seed"),
        (SamplerParams(choice=2**32), "choice"),
        (SamplerParams(top_k=-2), "top_k"),
        (SamplerParams(logprobs=-2), "logprobs"),
    ],
)
def test_parameters_without_a_meaning(
    make: MakeSampler, params: SamplerParams, message: str
) -> None:
    sampler = make(5)
    with pytest.raises(ValueError, match=message):
        sampler.open(1, params, [], [])
    assert sampler.open_sequences == 0


def test_memory_goes_back() -> None:
    """Open, append, close, a thousand times over: the process does not grow."""

    def resident() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * mmap.PAGESIZE

    rng = np.random.default_rng(1)
    sampler = Sampler(1000)
    logits = random_logits(rng, 1, 1000)
    mixes = [random_params(rng, 1000)._replace(no_repeat_ngram_size=3) for _ in range(50)]
    prompt = rng.integers(0, 1000, 20000).astype(np.int32)

    def churn(rounds: int) -> None:
        for _ in range(rounds):
            for i, params in enumerate(mixes):
                sampler.open(i, params, prompt, [1] * 50)
            sampler.draw(logits, range(50), [0] * 50)
            sampler.append(range(50), [7] * 50)
            for i in range(50):
                sampler.close(i)

    churn(4)
    before = resident()
    churn(40)
    assert sampler.open_sequences == 0
    # One round's prompts alone are 4 MB.
    assert resident() - before < 3_000_000


class Lives(RuleBasedStateMachine):
    """Random lives of sequences in both samplers; every step draws for all that are open."""

    def __init__(self) -> None:
        super().__init__()
        self.samplers = Sampler(20), PlainSampler(20)
        self.opened: list[int] = []
        self.next = 0

    @rule(seed=st.integers(0, 2**32), prompt=st.lists(st.integers(0, 20), max_size=6))
    def open(self, seed: int, prompt: list[int]) -> None:
        params = random_params(np.random.default_rng(seed), 20)
        for sampler in self.samplers:
            sampler.open(self.next, params, prompt, [])
        self.opened.append(self.next)
        self.next += 1

    @precondition(lambda self: self.opened)
    @rule(place=st.integers(0, 2**16))
    def close(self, place: int) -> None:
        sequence = self.opened.pop(place % len(self.opened))
        for sampler in self.samplers:
            sampler.close(sequence)

    @rule(seed=st.integers(0, 2**32))
    def step(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        logits = random_logits(rng, 3, 20)
        rows = rng.integers(0, 3, len(self.opened)).tolist()
        native, plain = (sampler.draw(logits, self.opened, rows) for sampler in self.samplers)
        np.testing.assert_array_equal(native.token_ids, plain.token_ids)
        drawn = [
            (sequence, token)
            for sequence, token in zip(self.opened, native.token_ids.tolist(), strict=True)
            if token >= 0
        ]
        for sampler in self.samplers:
            sampler.append([sequence for sequence, _ in drawn], [token for _, token in drawn])

    @invariant()
    def counted(self) -> None:
        assert {sampler.open_sequences for sampler in self.samplers} == {len(self.opened)}


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
