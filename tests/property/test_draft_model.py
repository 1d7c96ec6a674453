"""DraftModel against fresh greedy decoding of the same model, through any mix of prefill chunks,
known and unknown drafts, copies of blocks, shared prefixes, and guesses that are not taken."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from step_driver import DrivenSequence, Floats, StepDriver
from tiny_models import save, tiny_model
from triptych.services.executor.backend import BackendOptions, open_backend
from triptych.services.executor.draft_model import DraftModel
from triptych.services.runtime.model_files import resolve_model

VOCABULARY = 96
CONTEXT = 128
PLANS: tuple[Literal["eager", "native"], ...] = ("eager", "native")
UNKNOWN = -1


@dataclass
class Drafted:
    """A sequence of the draft model: all its tokens have their keys and values in its cache."""

    place: DrivenSequence = field(default_factory=DrivenSequence)
    tokens: list[int] = field(default_factory=list)


Row = tuple[Drafted, list[int], int]  # known tokens to compute, and how many to guess behind them


class DraftBench:
    """A draft model with a driver of its cache, and the same model apart from it, always fresh."""

    def __init__(self, folder: Path, plan: Literal["eager", "native"]) -> None:
        options = BackendOptions(
            plan=plan,
            kv_cache_memory=1 << 20,
            kv_cache_dtype="float32",
            threads=1 if plan == "eager" else 2,
        )
        files = resolve_model(str(folder))
        backend = open_backend(files, options)
        self.draft = DraftModel(backend)
        self.driver = StepDriver(backend)
        self._fresh = StepDriver(open_backend(files, options))
        # The native plan's numbers are the same bit for bit, however a sequence was cut.
        self._tolerance = 0.0 if plan == "native" else 1e-4

    def guess(self, rows: Sequence[Row], copies: Sequence[tuple[int, int]] = ()) -> list[list[int]]:
        """Compute a step; each row's guesses. Their keys and values count as the sequence's."""
        inputs = self.driver.inputs(
            [(each.place, [*known, *[UNKNOWN] * count]) for each, known, count in rows]
        )
        sources, targets = np.array(copies, np.int32).reshape(-1, 2).T.copy()
        inputs = replace(inputs, copy_sources=sources, copy_targets=targets)
        before = inputs.token_ids.copy()
        guessed, ids = self.draft.guess(inputs)
        assert inputs.token_ids.tolist() == before.tolist(), "the slot itself is never written to"
        assert guessed.token_ids[before == UNKNOWN].tolist() == ids.tolist()
        assert guessed.token_ids[before != UNKNOWN].tolist() == before[before != UNKNOWN].tolist()
        assert replace(guessed, token_ids=before) == replace(inputs, token_ids=before)
        left = ids.tolist()
        out = []
        for each, known, count in rows:
            mine, left = left[:count], left[count:]
            each.tokens += [*known, *mine]
            out.append(mine)
        assert left == []
        return out

    def keep(self, sequence: Drafted, length: int) -> None:
        """All but the first `length` tokens were not taken."""
        del sequence.tokens[length:]
        sequence.place.computed = length

    def fresh(self, tokens: Sequence[int]) -> Floats:
        """Logits behind the tokens, computed in one piece in blocks of their own."""
        place = DrivenSequence()
        logits: Floats = self._fresh.step([(place, tokens)])[0]
        self._fresh.release(place)
        return logits

    def check(self, before: Sequence[int], guesses: Sequence[int]) -> None:
        """Each guess is the likeliest token behind all before it."""
        tokens = list(before)
        for guess in guesses:
            logits = self.fresh(tokens)
            if self._tolerance:
                assert logits[guess] >= logits.max() - self._tolerance
            else:
                assert guess == int(logits.argmax())
            tokens.append(guess)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("draft")
    save(tiny_model("llama", {}), path)
    return path


@pytest.fixture(scope="module", params=PLANS)
def bench(folder: Path, request: pytest.FixtureRequest) -> DraftBench:
    return DraftBench(folder, request.param)


@dataclass(frozen=True)
class Turn:
    """What a sequence does in a step: how many prompt tokens, drafts known and not, and how many of
    the guesses are taken. `joins`: begin anew, with what another sequence has in common."""

    known: int
    unknown: int
    taken: int
    joins: int | None


TURNS = st.builds(
    Turn,
    known=st.integers(0, 20),
    unknown=st.integers(0, 5),
    taken=st.integers(0, 5),
    joins=st.none() | st.integers(0, 3),
)


@settings(max_examples=40)
@given(
    steps=st.lists(st.lists(TURNS, min_size=4, max_size=4), min_size=1, max_size=8),
    seed=st.integers(0, 2**16),
)
def test_guesses_are_those_of_greedy_decoding(
    bench: DraftBench, steps: list[list[Turn]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    sequences = [Drafted() for _ in range(4)]
    bench.driver.free = list(range(bench.draft.facts.num_blocks))
    shared: set[int] = set()  # blocks of several sequences: never given back here
    for turns in steps:
        rows: list[Row] = []
        copies: list[tuple[int, int]] = []
        for number, turn in enumerate(turns):
            if turn.joins is not None and turn.joins != number and turn.known:
                other = sequences[turn.joins]
                if any(each is other for each, _, _ in rows):
                    continue  # it writes in this step
                release(bench, sequences[number], shared)
                sequences[number] = joined(bench, other, copies, shared)
            sequence = sequences[number]
            if len(sequence.tokens) + turn.known + turn.unknown > CONTEXT:
                release(bench, sequence, shared)
                sequence = sequences[number] = Drafted()
            if turn.known:
                known = [int(each) for each in rng.integers(0, VOCABULARY, turn.known)]
                rows.append((sequence, known, turn.unknown))
        if not rows:
            continue
        befores = [[*sequence.tokens, *known] for sequence, known, _ in rows]
        guesses = bench.guess(rows, copies)
        taken = [turn.taken for turn in turns]
        for (sequence, _, _), before, mine in zip(rows, befores, guesses, strict=True):
            bench.check(before, mine)
            number = next(i for i, each in enumerate(sequences) if each is sequence)
            bench.keep(sequence, len(before) + min(len(mine), taken[number]))
    for sequence in sequences:
        if sequence.tokens:  # and what was kept is what a fresh computation has
            (last,) = bench.guess([(sequence, [1], 1)])
            bench.check(sequence.tokens[:-1], last)


def joined(
    bench: DraftBench, other: Drafted, copies: list[tuple[int, int]], shared: set[int]
) -> Drafted:
    """A new sequence that has full blocks in common with another, and a copy of its last one."""
    size = bench.draft.facts.block_size
    length = other.place.computed
    full = length // size
    blocks = other.place.blocks[:full]
    shared.update(blocks)
    if length % size:
        blocks = [*blocks, bench.driver.free.pop(0)]
        copies.append((other.place.blocks[full], blocks[-1]))
    return Drafted(DrivenSequence(length, blocks), list(other.tokens))


def release(bench: DraftBench, sequence: Drafted, shared: set[int]) -> None:
    """Give blocks back that are the sequence's alone, to be the next ones taken."""
    own = [block for block in sequence.place.blocks if block not in shared]
    bench.driver.free = own + bench.driver.free
