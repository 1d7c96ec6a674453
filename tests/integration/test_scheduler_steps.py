"""The step loop between real sockets and real rings: streams, preemption, sampling in place.

The loop runs on a thread of the test, the executor in a process of its own, the tokenizers are
sockets of the test.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fake_executor import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    VOCABULARY,
    continuation,
)
from scheduler_bench import MakeEngine
from triptych.engine_core.step import FinishReason
from triptych.kernels.sampler_params import Drawn, SamplerProtocol
from triptych.services.scheduler import loop
from triptych.services.scheduler.sampler import new_sampler
from triptych.services.scheduler.steps import Steps

LENGTH = FinishReason.LENGTH


@pytest.mark.parametrize("impl", ["native", "python"])
def test_streams(make_engine: MakeEngine, impl: str) -> None:
    engine = make_engine(engine_impl=impl)
    engine.executor()
    one, other = engine.tokenizer(), engine.tokenizer()
    prompts = [list(range(1, 2 + 3 * n)) for n in range(12)]
    slots = [(one, one.submit(prompt, 10)) for prompt in prompts]
    slots += [(other, other.submit(prompt, 10)) for prompt in prompts]
    one.until(lambda: one.ended(*(slot for owner, slot in slots if owner is one)))
    other.until(lambda: other.ended(*(slot for owner, slot in slots if owner is other)))
    for (owner, slot), prompt in zip(slots, prompts * 2, strict=True):
        assert owner.tokens[slot] == continuation(prompt, 10)
        assert owner.finished[slot] is LENGTH
    assert one.messages < 12 * 10  # batches, never a message for each token
    engine.until_idle()
    assert engine.stats.generated_tokens_total == 240
    assert engine.stats.requests_finished_total == 24
    times = engine.stats.step_times
    assert min(times.plan, times.write_inputs, times.execute, times.sample, times.apply) > 0
    assert times.emit > 0


def test_tokens_go_out_before_the_next_answer_is_taken(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However quick the executor is: here the next answer is always there already."""
    dispatch = Steps.dispatch

    def and_answered(steps: Steps) -> None:
        dispatch(steps)
        time.sleep(0.03)

    monkeypatch.setattr(Steps, "dispatch", and_answered)
    engine = make_engine()
    engine.executor()
    tokenizer = engine.tokenizer()
    slot = tokenizer.submit([1, 2], 50)
    tokenizer.until(lambda: tokenizer.tokens[slot])
    assert not tokenizer.ended(slot)
    tokenizer.until(lambda: tokenizer.ended(slot))
    assert tokenizer.tokens[slot] == continuation([1, 2], 50)


def test_the_welcome_waits_for_an_executor(make_engine: MakeEngine) -> None:
    engine = make_engine()
    tokenizer = engine.stranger()
    tokenizer.until(lambda: tokenizer.beats)
    assert not tokenizer.welcomes
    assert not tokenizer.beats[-1].executor_ready
    assert not engine.loop.snapshot.serving
    engine.executor(num_blocks=8)
    tokenizer.until(lambda: tokenizer.welcomes)
    [welcome] = tokenizer.welcomes
    assert welcome.epoch == 77
    assert welcome.max_sequence_len == 8 * BLOCK_SIZE < MAX_MODEL_LEN
    assert welcome.model.vocabulary_size == VOCABULARY
    engine.until(lambda: engine.loop.snapshot.serving)
    tokenizer.until(lambda: tokenizer.executor_ready)


def test_preemption_changes_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.executor(num_blocks=10)
    tokenizer = engine.tokenizer()
    slots = [tokenizer.submit([n, n + 1, n + 2], 30) for n in range(6)]
    tokenizer.until(lambda: tokenizer.ended(*slots))
    for n, slot in enumerate(slots):
        assert tokenizer.tokens[slot] == continuation([n, n + 1, n + 2], 30)
    assert engine.stats.preemptions_total > 0
    engine.until_idle()


def test_a_resumed_request_goes_on(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.executor()
    tokenizer = engine.tokenizer()
    whole = continuation([5, 6], 12)
    slot = tokenizer.submit([5, 6], 12, sent=whole[:7])
    tokenizer.until(lambda: tokenizer.ended(slot))
    assert tokenizer.tokens[slot] == whole[7:]


Rows = npt.NDArray[np.float32]


class Spy:
    """A sampler that shows the logits that it is given to a test."""

    def __init__(self, inner: SamplerProtocol, look: Callable[[Rows], None]) -> None:
        self._inner, self._look = inner, look
        self.open, self.append, self.close = inner.open, inner.append, inner.close
        self.score = inner.score

    def draw(self, logits: Rows, sequence_ids: Sequence[int], logits_rows: Sequence[int]) -> Drawn:
        self._look(logits)
        return self._inner.draw(logits, sequence_ids, logits_rows)


def spy_with(monkeypatch: pytest.MonkeyPatch, look: Callable[[Rows], None]) -> None:
    """The next loop's sampler calls `look` before it draws."""

    def spied(*arguments: Any, **options: Any) -> Spy:
        return Spy(new_sampler(*arguments, **options), look)

    monkeypatch.setattr(loop, "new_sampler", spied)


def test_the_sampler_reads_the_ring_in_place(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int, bool]] = []

    def note(logits: Rows) -> None:
        seen.append((logits.ctypes.data, logits.nbytes, logits.flags.writeable))

    spy_with(monkeypatch, note)
    engine = make_engine()
    engine.executor()  # another process: the one logits ring in our maps is the one it writes
    tokenizer = engine.tokenizer()
    slots = [tokenizer.submit([n], 4) for n in range(3)]
    tokenizer.until(lambda: tokenizer.ended(*slots))
    [ring] = [
        line.split()
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "/memfd:triptych-logits" in line
    ]
    low, high = (int(each, 16) for each in ring[0].split("-"))
    assert ring[1] == "r--s"  # mapped read-only, shared
    assert seen
    for address, size, writable in seen:
        assert low <= address
        assert address + size <= high
        assert not writable


def test_a_bug_ends_the_loop_loudly(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_logits: Rows) -> None:
        raise AssertionError("a bug")

    spy_with(monkeypatch, broken)
    engine = make_engine()
    engine.executor()
    tokenizer = engine.tokenizer()
    tokenizer.submit([1], 4)
    tokenizer.until(lambda: engine.error)
    assert isinstance(engine.error, AssertionError)
    engine.error = None
