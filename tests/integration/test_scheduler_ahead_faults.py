"""Aborts, failures and deaths while two steps are in flight: nothing is lost, nothing is left."""

import os
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import zmq

from ahead_mixes import (
    DRAWN_BY_THE_DEVICE,
    FROM_BOTH,
    PLAIN,
    got,
    is_plain,
    served,
    started,
    until_empty,
    wish,
)
from fake_executor import (
    BLOCK_SIZE,
    FINGERPRINT,
    MAX_MODEL_LEN,
    NAN_TOKEN,
    RAISE_TOKEN,
    VOCABULARY,
    continuation,
)
from fake_tokenizer import FakeTokenizer
from scheduler_bench import Engine, MakeEngine
from triptych.engine_core.errors import NotFinite, Unavailable
from triptych.services.executor.backend import DrawnColumns
from triptych.services.executor.scheduler_link import SchedulerLink
from triptych.services.executor.step_answers import done, failed
from triptych.services.runtime.run_dir import RunDir
from triptych.v1 import stage_pb2


def test_aborts_in_between(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.executor(draws_tokens=1, step_seconds=0.01)
    tokenizer = engine.tokenizer()
    gone = started(tokenizer, [wish(n, 1, tokens=200) for n in range(3)])
    stays = started(tokenizer, [wish(n, 2, tokens=40) for n in range(3)])
    for count, slot in enumerate(gone, 4):
        tokenizer.until(partial(_has_tokens, tokenizer, stays[0], 2 * count))
        tokenizer.abort(slot)
    assert [each.tokens for each in got(tokenizer, stays)] == [
        continuation((n, 2), 40) for n in range(3)
    ]
    until_empty(engine)
    assert engine.stats.requests_aborted_total == 3
    assert engine.stats.wasted_tokens_total <= 6
    assert not tokenizer.ended(*gone)


def _has_tokens(tokenizer: FakeTokenizer, slot: int, count: int) -> bool:
    return len(tokenizer.tokens[slot]) >= count


@pytest.mark.parametrize("draws_tokens", [0, 1])
def test_an_executor_that_dies_with_two_steps(make_engine: MakeEngine, draws_tokens: int) -> None:
    """Its successor draws tokens or does not: all go on from the tokens that are out."""
    wishes = [*DRAWN_BY_THE_DEVICE, FROM_BOTH]
    shape = {"max_num_seqs": 32, "max_num_batched_tokens": 64}
    expected, _ = served(make_engine, wishes, shape, num_blocks=200)
    engine = make_engine(**shape)
    first = engine.executor(draws_tokens=1, step_seconds=0.1, num_blocks=200)
    tokenizer = engine.tokenizer()
    slots = started(tokenizer, wishes)
    engine.until(lambda: engine.stats.slots_free == 0)  # two steps in flight
    tokenizer.until(lambda: any(len(tokenizer.tokens[slot]) > 3 for slot in slots))
    first.kill()
    tokenizer.until(lambda: not tokenizer.executor_ready)
    engine.until(lambda: engine.stats.slots_free == engine.stats.slots_total)
    before = engine.stats.device_tokens_total
    engine.executor(draws_tokens=draws_tokens, num_blocks=200)
    outcome = got(tokenizer, slots)
    # Prompt logprobs that were out when it died come once.
    assert [each._replace(prompt_logprobs=[]) for each in outcome] == [
        each._replace(prompt_logprobs=[]) for each in expected
    ]
    until_empty(engine)
    assert engine.stats.executors_lost_total == 1
    assert (engine.stats.device_tokens_total > before) == bool(draws_tokens)


def test_a_step_that_fails_takes_its_sequences_and_no_other(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.executor(draws_tokens=1, step_seconds=0.01)
    tokenizer = engine.tokenizer()
    beside = started(tokenizer, [wish(n, 1, tokens=200) for n in range(3)])
    tokenizer.until(lambda: all(len(tokenizer.tokens[slot]) > 3 for slot in beside))
    broken = tokenizer.submit([1, RAISE_TOKEN], 5)
    tokenizer.until(lambda: tokenizer.ended(broken, *beside))
    assert isinstance(tokenizer.failed[broken], Unavailable)
    for slot in beside:  # they were in its step
        assert isinstance(tokenizer.failed[slot], Unavailable)
    until_empty(engine)
    after = started(tokenizer, PLAIN)
    assert is_plain(got(tokenizer, after))
    assert engine.stats.executors_lost_total == 0


def test_logits_that_are_not_finite_end_one_sequence(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.executor(draws_tokens=1, step_seconds=0.005)
    tokenizer = engine.tokenizer()
    beside = started(tokenizer, PLAIN)
    tokenizer.until(lambda: tokenizer.tokens[beside[0]])
    broken = [tokenizer.submit([1, NAN_TOKEN], 5), tokenizer.submit([1, NAN_TOKEN], 5, logprobs=2)]
    assert is_plain(got(tokenizer, beside))
    tokenizer.until(lambda: tokenizer.ended(*broken))
    for slot in broken:
        assert isinstance(tokenizer.failed[slot], NotFinite)
        assert not tokenizer.tokens[slot]
    until_empty(engine)


@pytest.mark.parametrize(
    ("lie", "params"),
    [
        ("few", {}),
        ("outside", {}),
        ("logprobs", {"logprobs": 2}),
        ("silent", {}),
        ("host", {}),
    ],
)
def test_a_broken_promise_ends_the_connection(
    make_engine: MakeEngine, lie: str, params: dict[str, Any]
) -> None:
    engine = make_engine()
    engine.executor(draws_tokens=1, lie=lie)
    tokenizer = engine.tokenizer()
    wishes = [wish(1, 2, **params), wish(3, 4, typical_p=0.9)]
    slots = started(tokenizer, wishes)
    engine.until(lambda: engine.stats.executors_lost_total == 1)
    assert [each.tokens for each in got(tokenizer, slots)] == [
        continuation(each.prompt, each.max_tokens) for each in wishes
    ]
    until_empty(engine)


class ByHand:
    """An executor whose answers a test writes. It draws tokens."""

    def __init__(self, run_dir: RunDir) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        facts = stage_pb2.ModelFacts(
            fingerprint=FINGERPRINT, architecture="fake", vocabulary_size=VOCABULARY,
            max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE, num_blocks=64,
        )  # fmt: skip
        hello = stage_pb2.ExecutorHello(model=facts, draws_tokens=True)
        joined = SchedulerLink(self._context, run_dir, "executor-0", hello).join(threading.Event())
        assert joined is not None
        self.session, _ = joined
        self._wake = os.eventfd(0)
        self.steps = self.session.steps(self._wake)

    def answer(self, ready: stage_pb2.StepReady, *token_ids: int) -> None:
        """The step is computed, and these were drawn."""
        column = np.array(token_ids, np.int32)
        none = np.zeros(0, np.int32)
        floats = np.zeros(0, np.float32)
        drawn = DrawnColumns(column, floats, none, none, none, floats)
        self.session.send(done(ready, 1000, drawn=drawn))

    def close(self) -> None:
        self.session.close()
        self._context.destroy(linger=0)
        os.close(self._wake)


@pytest.fixture
def by_hand(make_engine: MakeEngine) -> Iterator[tuple[Engine, ByHand]]:
    engine = make_engine()
    executor = ByHand(engine.run_dir)
    yield engine, executor
    executor.close()


def test_answers_are_taken_in_order(by_hand: tuple[Engine, ByHand]) -> None:
    engine, executor = by_hand
    tokenizer = engine.tokenizer()
    slot = tokenizer.submit([1, 2], 4)
    first, second = next(executor.steps), next(executor.steps)
    unknown = stage_pb2.StepReady(step_id=99, slot=0, epoch=first.epoch)
    executor.answer(unknown, 5)  # the late word of another life: nobody's
    executor.answer(first, 11)
    third = next(executor.steps)
    executor.answer(second, 12)
    executor.answer(third, 13)
    executor.answer(next(executor.steps), 14)
    assert got(tokenizer, [slot])[0].tokens == [11, 12, 13, 14]
    until_empty(engine)
    assert engine.stats.executors_lost_total == 0
    assert engine.stats.steps_ahead_total == 3


@pytest.mark.parametrize("fails", [False, True])
def test_an_answer_out_of_turn_ends_the_connection(
    by_hand: tuple[Engine, ByHand], fails: bool
) -> None:
    engine, executor = by_hand
    tokenizer = engine.tokenizer()
    slot = tokenizer.submit([1, 2], 4)
    _, second = next(executor.steps), next(executor.steps)
    if fails:
        executor.session.send(failed(second, "too early"))
    else:
        executor.answer(second, 12)
    engine.until(lambda: engine.stats.executors_lost_total == 1)
    assert engine.stats.slots_free == engine.stats.slots_total
    assert not list(executor.steps), "its connection has ended"
    engine.executor(draws_tokens=1)
    assert got(tokenizer, [slot])[0].tokens == continuation([1, 2], 4)


def test_a_failed_step_and_the_one_behind_it(by_hand: tuple[Engine, ByHand]) -> None:
    """Who is in both ends once; the one behind is waited for, whatever it brings."""
    engine, executor = by_hand
    tokenizer = engine.tokenizer()
    slot = tokenizer.submit([1, 2], 9)
    first, second = next(executor.steps), next(executor.steps)
    executor.session.send(failed(first, "of a fault"))
    tokenizer.until(lambda: tokenizer.ended(slot))
    assert isinstance(tokenizer.failed[slot], Unavailable)
    later = tokenizer.submit([3], 1)
    engine.until(lambda: engine.stats.requests_waiting == 1)
    assert engine.stats.slots_free == 1, "the second step holds its slot"
    executor.answer(second, 12)
    executor.answer(next(executor.steps), 7)
    assert got(tokenizer, [later])[0].tokens == [7]
    until_empty(engine)


def test_a_scheduler_that_stops_with_two_steps_in_flight(make_engine: MakeEngine) -> None:
    engine = make_engine()
    executor = engine.executor(draws_tokens=1, step_seconds=0.2)
    tokenizer = engine.tokenizer()
    started(tokenizer, [wish(1, tokens=MAX_MODEL_LEN - 2)])  # for a minute
    engine.until(lambda: engine.stats.slots_free == 0)
    engine.stop()
    assert engine.stats.requests_tracked == 1
    assert engine.stopped
    assert engine.error is None
    assert not executor.ended  # it says hello to the next one
