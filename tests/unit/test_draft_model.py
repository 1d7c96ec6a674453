"""DraftModel: how it computes a step, what it refuses, and what becomes of its guesses."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from step_driver import DrivenSequence, StepDriver
from tiny_models import save, tiny_model
from triptych.services.executor.backend import (
    Backend,
    BackendFacts,
    BackendOptions,
    Logits,
    open_backend,
)
from triptych.services.executor.draft_model import DraftModel
from triptych.services.executor.draft_opening import open_with_draft
from triptych.services.executor.step_inputs import StepInputs, StepInputsError
from triptych.services.runtime.model_files import resolve_model

UNKNOWN = -1
FACTS = BackendFacts(
    device="none", plan="none", dtype="float32", architecture="none", model="none", parameters=0,
    weight_bytes=0, vocabulary_size=10, max_model_len=32, block_size=4, num_blocks=16,
    kv_cache_bytes=0,
)  # fmt: skip


class Recorder:
    """A Backend that keeps what it is told; its logits are what the test says."""

    def __init__(self, logits: Sequence[float] = (0.0,) * 10) -> None:
        self.facts = FACTS
        self.steps: list[StepInputs] = []
        self.reserved = 0
        self._logits = np.array(logits, np.float32)

    def reserve(self, max_tokens: int) -> None:
        self.reserved = max_tokens

    def execute(self, inputs: StepInputs, logits: Logits) -> None:
        inputs.check(vocabulary_size=10, max_model_len=32, num_blocks=16, block_size=4)
        inputs.check_room(len(logits))
        self.steps.append(inputs)
        logits[: inputs.num_logits] = self._logits


def guess(
    backend: Recorder, *rows: tuple[DrivenSequence, list[int]]
) -> tuple[StepInputs, list[int]]:
    inputs, ids = DraftModel(backend).guess(StepDriver(backend).inputs(rows))
    return inputs, ids.tolist()


def test_a_step_without_unknown_tokens_is_computed_without_logits() -> None:
    backend = Recorder()
    driver = StepDriver(backend)
    inputs = driver.inputs([(DrivenSequence(), [1, 2, 3])])
    inputs = replace(
        inputs, copy_sources=np.array([1], np.int32), copy_targets=np.array([2], np.int32)
    )
    same, ids = DraftModel(backend).guess(inputs)
    assert same is inputs
    assert ids.dtype == np.int32
    assert ids.size == 0
    (step,) = backend.steps
    assert (step.num_logits, step.token_ids.tolist()) == (0, [1, 2, 3])
    assert (step.copy_sources.tolist(), step.copy_targets.tolist()) == ([1], [2])


def test_rows_are_computed_without_their_unknown_tokens_then_one_by_one() -> None:
    """Of equals the lowest id; copies once; a row drops out behind its last guess."""
    backend = Recorder([0.0, 0.0, 5.0, 1.0, 5.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    first, second, third = DrivenSequence(), DrivenSequence(), DrivenSequence()
    driver = StepDriver(backend)
    rows = [
        (first, [1, UNKNOWN, UNKNOWN, UNKNOWN]),
        (second, [3, 4]),
        (third, [5, 6, UNKNOWN]),
    ]
    inputs = driver.inputs(rows)
    inputs = replace(
        inputs, copy_sources=np.array([9], np.int32), copy_targets=np.array([8], np.int32)
    )
    guessed, ids = DraftModel(backend).guess(inputs)
    assert ids.tolist() == [2, 2, 2, 2]
    assert guessed.token_ids.tolist() == [1, 2, 2, 2, 3, 4, 5, 6, 2]
    assert inputs.token_ids.tolist() == [1, -1, -1, -1, 3, 4, 5, 6, -1]
    assert [
        (step.token_ids.tolist(), step.positions.tolist(), step.kv_lengths.tolist())
        for step in backend.steps
    ] == [
        ([1, 3, 4, 5, 6], [0, 0, 1, 0, 1], [1, 2, 2]),
        ([2, 2], [1, 2], [2, 3]),
        ([2], [2], [3]),
        ([2], [3], [4]),
    ]
    assert [step.logits_tokens.tolist() for step in backend.steps] == [[0, 4], [0], [0], []]
    assert [step.num_rows for step in backend.steps] == [3, 2, 1, 1]
    assert [step.copy_sources.tolist() for step in backend.steps] == [[9], [], [], []]
    third_step = backend.steps[2]
    assert third_step.block_tables.tolist() == inputs.block_tables[:1].tolist()
    assert third_step.slots.tolist() == inputs.slots[2:3].tolist()


def test_a_guess_is_a_token_even_where_logits_are_not_finite() -> None:
    assert guess(Recorder([np.nan] * 10), (DrivenSequence(), [1, UNKNOWN]))[1] == [0]


def test_reserve() -> None:
    backend = Recorder()
    DraftModel(backend).reserve(64, 4)
    assert backend.reserved == 64


@pytest.mark.parametrize(
    "tokens",
    [[UNKNOWN], [UNKNOWN, 1], [1, UNKNOWN, 2], [1, UNKNOWN, 2, UNKNOWN], [UNKNOWN, UNKNOWN]],
)
def test_unknown_tokens_stand_behind_known_ones(tokens: list[int]) -> None:
    backend = Recorder()
    with pytest.raises(StepInputsError, match="unknown tokens are not behind known ones"):
        guess(backend, (DrivenSequence(), [1, 2]), (DrivenSequence(), tokens))
    assert backend.steps == []


def test_a_step_that_is_out_of_range_changes_nothing() -> None:
    """Also where only a token that is guessed last is."""
    backend = Recorder()
    inputs = StepDriver(backend).inputs([(DrivenSequence(), [1, UNKNOWN, UNKNOWN])])
    slots = inputs.slots.copy()
    slots[2] = FACTS.num_blocks * FACTS.block_size
    for wrong, message in (
        (replace(inputs, slots=slots), "slot 64 is not within"),
        (replace(inputs, token_ids=np.array([10, -1, -1], np.int32)), "token id 10"),
        (replace(inputs, token_ids=np.array([-2, -1, -1], np.int32)), "token id -2"),
    ):
        with pytest.raises(StepInputsError, match=message):
            DraftModel(backend).guess(wrong)
    assert backend.steps == []


@pytest.mark.parametrize("plan", ["eager", "native"])
def test_the_served_model_refuses_unknown_tokens(
    plan: Literal["eager", "native"], folder: Path
) -> None:
    backend = open_backend(resolve_model(str(folder)), options(plan))
    driver = StepDriver(backend)
    with pytest.raises(StepInputsError, match="token id -1 is not within 0 and 95"):
        driver.step([(DrivenSequence(), [1, UNKNOWN])])


# ------------------------------------------------------------------ a loop of speculation


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served")
    save(tiny_model("llama", {}), path)
    return path


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("smaller")
    save(tiny_model("llama", {"num_hidden_layers": 1, "hidden_size": 24}), path)
    return path


def options(plan: Literal["eager", "native"]) -> BackendOptions:
    return BackendOptions(plan=plan, kv_cache_memory=1 << 20, kv_cache_dtype="float32", threads=1)


def plain(backend: Backend, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy decoding, a token a step."""
    driver, sequence, tokens = StepDriver(backend), DrivenSequence(), list(prompt)
    pending = tokens
    for _ in range(count):
        logits = driver.step([(sequence, pending)])[0]
        pending = [int(logits.argmax())]
        tokens = tokens + pending
    return tokens[len(prompt) :]


@dataclass
class Decoded:
    """A sequence in the loop: all its tokens but the last are computed."""

    tokens: list[int]
    drafts: int
    left: int
    place: DrivenSequence = field(default_factory=DrivenSequence)


class Speculation:
    """Greedy decoding of several prompts at once as a scheduler with a draft model does it."""

    def __init__(self, backend: Backend, draft: DraftModel) -> None:
        self._backend, self._draft = backend, draft
        self._driver = StepDriver(backend)
        self._logits = np.zeros((64, backend.facts.vocabulary_size), np.float32)
        self.drafted = self.taken = self.steps = 0

    def run(
        self, prompts: Sequence[list[int]], drafts: Sequence[int], count: int
    ) -> list[list[int]]:
        """`count` tokens behind each prompt, with so many guesses a step for each."""
        decoded = [
            Decoded(list(prompt), guesses, count)
            for prompt, guesses in zip(prompts, drafts, strict=True)
        ]
        for each in decoded:
            for start in range(0, len(each.tokens) - 1, 5):
                self._step([(each.place, each.tokens[:-1][start : start + 5])])
        while running := [each for each in decoded if each.left > 0]:
            self._decode(running)
            self.steps += 1
        return [
            each.tokens[len(prompt) :][:count]
            for each, prompt in zip(decoded, prompts, strict=True)
        ]

    def _step(self, rows: list[tuple[DrivenSequence, list[int]]]) -> tuple[list[int], list[int]]:
        """The step's tokens with its guesses, and the likeliest token behind each of them."""
        inputs, _ = self._draft.guess(self._driver.inputs(rows))
        every = np.arange(inputs.num_tokens, dtype=np.int32)
        self._backend.execute(replace(inputs, logits_tokens=every), self._logits)
        likeliest: list[int] = self._logits[: inputs.num_tokens].argmax(axis=1).tolist()
        return inputs.token_ids.tolist(), likeliest

    def _decode(self, running: list[Decoded]) -> None:
        rows = [(each.place, [each.tokens[-1], *[UNKNOWN] * each.drafts]) for each in running]
        computed, drawn = self._step(rows)
        at = 0
        for each in running:
            taken = 0
            while taken < each.drafts and drawn[at + taken] == computed[at + taken + 1]:
                taken += 1
            each.tokens += drawn[at : at + taken + 1]
            each.left -= taken + 1
            each.place.computed = len(each.tokens) - 1
            self.drafted, self.taken = self.drafted + each.drafts, self.taken + taken
            at += each.drafts + 1


PROMPTS = [[5, 17, 3, 90, 41, 8, 8], [1], list(range(40, 63))]


@pytest.mark.parametrize("plan", ["eager", "native"])
def test_a_draft_model_that_is_the_served_one_is_always_right(
    plan: Literal["eager", "native"], folder: Path
) -> None:
    files = resolve_model(str(folder))
    backend, draft = open_with_draft(files, files, options(plan), lambda done, total: None)
    loop = Speculation(backend, draft)
    answers = loop.run(PROMPTS, (4, 0, 2), 30)
    alone = open_backend(files, options(plan))
    assert answers == [plain(alone, prompt, 30) for prompt in PROMPTS]
    assert loop.taken == loop.drafted > 0
    assert loop.steps == 30  # of the one that guesses nothing


@pytest.mark.parametrize("plan", ["eager", "native"])
def test_whatever_a_draft_model_guesses_the_output_is_the_same(
    plan: Literal["eager", "native"], folder: Path, smaller: Path
) -> None:
    files = resolve_model(str(folder))
    backend, draft = open_with_draft(
        files, resolve_model(str(smaller)), options(plan), lambda done, total: None
    )
    loop = Speculation(backend, draft)
    answers = loop.run(PROMPTS, (3, 5, 1), 40)
    alone = open_backend(files, options(plan))
    assert answers == [plain(alone, prompt, 40) for prompt in PROMPTS]
    assert loop.taken < loop.drafted


@pytest.mark.smollm
def test_a_real_model_guesses_its_own_tokens(smollm: Path) -> None:
    files = resolve_model(str(smollm))
    backend, draft = open_with_draft(
        files,
        files,
        BackendOptions(max_model_len=256, kv_cache_memory=64 << 20, threads=2),
        lambda done, total: None,
    )
    assert backend.facts.plan == draft.facts.plan == "native"
    prompt = [1, 504, 3575, 282, 4649, 314]
    loop = Speculation(backend, draft)
    answers = loop.run([prompt, prompt[:3]], (5, 3), 24)
    assert answers == [plain(backend, prompt, 24), plain(backend, prompt[:3], 24)]
    assert loop.taken == loop.drafted
    assert loop.steps == 6  # of 4 tokens each
