"""The C++ batch is the plain one: same answers, errors, bytes and free blocks, call by call.

Calls come in any order, out of turn and with wrong arguments too: what is right about the answers
is test_batch_machine's question.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from batch_twins import NATIVE_BATCH
from core_engine import Engine, Shape, requests
from triptych.engine_core.batch import UNKNOWN_DRAFT, Batch, SequenceRules
from triptych.engine_core.errors import RequestError, Unavailable
from triptych.engine_core.ids import RequestId, SequenceId
from triptych.engine_core.layout import StepLayout
from triptych.engine_core.python_batch import PythonBatch
from triptych.kernels import core

LAYOUT = StepLayout(
    num_slots=2,
    max_tokens=24,
    max_rows=7,
    max_blocks_per_row=9,
    max_logits=16,
    max_transfers=3,
)
VOCABULARY = 3
Outcome = tuple[str, object]


def outcome(call: Callable[[], object]) -> Outcome:
    """What a call returns, or the name of what it raises."""
    try:
        return "returned", call()
    except (AssertionError, KeyError, OverflowError, ValueError, RequestError) as error:
        return "raised", type(error).__name__


class Pair:
    """Both batches. Each has two slots, which hold what earlier steps left there."""

    def __init__(self, num_blocks: int, block_size: int, caching: bool, host: int) -> None:
        self.python = PythonBatch(num_blocks, block_size, LAYOUT, caching, host)
        self.native = core.Batch(num_blocks, block_size, LAYOUT, caching, host)
        self.both: tuple[Batch, Batch] = (self.python, cast(Batch, self.native))
        self.slots = [[bytearray(LAYOUT.slot_bytes) for _ in self.both] for _ in range(2)]
        self.steps = 0

    def ask(self, call: Callable[[Batch], object]) -> Outcome:
        """What both answer."""
        left, right = (outcome(partial(call, batch)) for batch in self.both)
        assert left == right
        self.compare()
        return left

    def write(self, slot: int, step_id: int) -> None:
        slots = self.slots[slot]
        left, right = (
            outcome(partial(batch.write, memoryview(slot), step_id))
            for batch, slot in zip(self.both, slots, strict=True)
        )
        assert left == right
        assert slots[0] == slots[1]
        self.compare()

    def forget_slot(self, slot: int, byte: int) -> None:
        """The ring begins anew, in other memory or the same."""
        self.slots[slot] = [bytearray([byte]) * LAYOUT.slot_bytes for _ in self.both]

    def compare(self) -> None:
        assert self.python._tables.pool.free_blocks() == self.native.free_blocks()
        facts, other = (_facts(batch) for batch in self.both)
        assert facts == other
        for batch in self.both:
            batch.check()


def _facts(batch: Batch) -> tuple[object, ...]:
    ids = [SequenceId(number) for number in batch.sequence_ids()]
    return (
        [(n, batch.token_ids(n), batch.num_computed(n), batch.table(n)) for n in ids],
        (batch.num_blocks, batch.block_size, batch.num_cached_blocks, batch.num_unused_slots),
        (batch.num_host_blocks, batch.num_host_blocks_used, batch.stores(), batch.loads()),
        (batch.prefix_queries_total, batch.prefix_hits_total, batch.host_hits_total),
        (batch.num_tokens, batch.num_rows, batch.num_logits),
        (batch.rows(), batch.copies(), batch.samples(), batch.drafts(), batch.scores()),
        (batch.rows_ahead(), batch.samples_ahead(), batch.scores_ahead()),
    )


@st.composite
def rules(draw: st.DrawFn) -> SequenceRules:
    return SequenceRules(
        request_id=draw(st.integers(0, 2**40)),
        num_prompt=draw(st.integers(1, 6)),
        max_tokens=draw(st.integers(1, 12)),
        max_len=draw(st.integers(8, 16)),
        stop_token_ids=draw(st.sampled_from(((), (), (), (0,), (2, 1)))),
        held=draw(st.sampled_from((False, False, False, True))),
        score_prompt=draw(st.sampled_from((False, False, True))),
        cached=draw(st.sampled_from((True, True, True, False))),
    )


class Calls:
    """Draws calls: mostly sensible ones, about few sequences with few texts."""

    def __init__(self, pair: Pair, data: st.DataObject) -> None:
        self.pair = pair
        self.draw = data.draw
        self.ids = st.integers(0, 6).map(SequenceId)
        self.texts: list[list[int]] = [[0]]

    def open(self) -> None:
        ids, tokens, digests = self.draw(self.ids), self._text(), b""
        salt = self.draw(st.sampled_from((b"", b"", b"salt")))
        _, found = self.pair.ask(lambda batch: batch.prefix_digests(tokens, salt))
        assert isinstance(found, bytes)
        digests = found[: self.draw(st.sampled_from((None, None, None, None, None, 16, -1)))]
        self.pair.ask(lambda batch: batch.match(tokens, digests))
        chosen, place = self.draw(rules()), self.draw(st.sampled_from((0, 0, 0, 1, 2, 5, -1)))
        spare = self.draw(st.sampled_from((0, 0, 0, 1, 4)))
        self.pair.ask(lambda batch: batch.open(ids, tokens, digests, chosen, place, spare))

    def _text(self) -> list[int]:
        stem = self.draw(st.sampled_from(self.texts))
        rest = self.draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=6))
        text = [*stem[: self.draw(st.integers(0, len(stem)))], *rest][:14]
        self.texts = [*self.texts[-6:], text]
        return text

    def fork(self) -> None:
        one, other, chosen = self.draw(self.ids), self.draw(self.ids), self.draw(rules())
        place = self.draw(st.integers(0, 2))
        batch = self.pair.python
        if one in batch.sequence_ids() and batch.num_computed(one) == len(batch.token_ids(one)):
            chosen = chosen._replace(held=True)  # only a held one may lack no token
        self.pair.ask(lambda batch: batch.fork(one, other, chosen, place))

    def append(self) -> None:
        ids = self.draw(self.ids)
        token = self.draw(st.sampled_from((0, 1, 2, 2**31)))
        self.pair.ask(lambda batch: batch.append(ids, token))

    def close(self) -> None:
        ids = self.draw(self.ids)
        self.pair.ask(lambda batch: batch.close(ids))

    def draft(self) -> None:
        ids, guess = self.draw(self.ids), st.integers(0, VOCABULARY - 1)
        guesses = self.draw(st.lists(guess, max_size=6))
        guesses += [UNKNOWN_DRAFT] * self.draw(st.sampled_from((0, 0, 1, 3)))
        guesses += self.draw(st.sampled_from(([],) * 9 + ([1], [-2])))
        self._draft(ids, guesses)

    def _draft(self, ids: SequenceId, guesses: list[int]) -> None:
        self.pair.ask(lambda batch: batch.draft(ids, guesses))

    def draft_all(self) -> None:
        for ids in self.pair.python.sequence_ids():
            guesses = self.draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=4))
            guesses += [UNKNOWN_DRAFT] * self.draw(st.sampled_from((0, 0, 1, 2)))
            self._draft(SequenceId(ids), guesses)

    def fill_drafts(self) -> None:
        count = self.pair.python.drafts().count(UNKNOWN_DRAFT)
        count += self.draw(st.sampled_from((0,) * 9 + (1,)))
        some = st.lists(st.integers(0, VOCABULARY - 1), min_size=count, max_size=count)
        tokens = self.draw(some)
        if tokens and self.draw(st.integers(0, 9)) == 0:
            tokens[self.draw(st.integers(0, count - 1))] = -1
        self.pair.ask(lambda batch: batch.fill_drafts(tokens))

    def plan(self) -> None:
        budget, most = self.draw(st.integers(0, 20)), self.draw(st.integers(0, 8))
        logits = self.draw(st.integers(0, 12))
        self.pair.ask(lambda batch: batch.plan(budget, most, logits))

    def plan_ahead(self) -> None:
        budget, most = self.draw(st.integers(0, 20)), self.draw(st.sampled_from((8, 8, 3, 1, 0)))
        logits = self.draw(st.integers(0, 12))
        host_drawn = self.draw(st.sets(st.integers(0, 6), max_size=2))
        self.pair.ask(lambda batch: batch.plan_ahead(host_drawn, budget, most, logits))

    def step_ahead(self) -> None:
        """Most often there is one, and it is written."""
        self.plan_ahead()
        if self.draw(st.integers(0, 9)) > 0:
            self.write()
            if self.draw(st.booleans()):
                self.fill_drafts()
                self.apply()

    def schedule(self) -> None:
        ids, most = self.draw(self.ids), self.draw(st.integers(0, 8))
        self.pair.ask(lambda batch: batch.schedule(ids, most))

    def write(self) -> None:
        slot = self.draw(st.integers(0, 1))
        if self.draw(st.integers(0, 9)) == 0:
            self.pair.forget_slot(slot, self.draw(st.sampled_from((0, 0xAA))))
        self.pair.steps += self.draw(st.sampled_from((1, 1, 1, 0)))
        self.pair.write(slot, self.pair.steps)

    def begin(self) -> None:
        self.pair.ask(lambda batch: batch.plan(12, 8, 9))
        self.write()
        self.fill_drafts()
        self.step_ahead()

    def apply(self) -> None:
        surplus = self.draw(st.sampled_from((0, 0, 0, 0, 0, 0, 0, 0, 0, 1)))
        count = len(self.pair.python.samples()[0]) + surplus
        some = st.lists(st.integers(0, VOCABULARY - 1), min_size=count, max_size=count)
        tokens = self.draw(some)
        for index, draft in enumerate(self.pair.python.drafts()):
            if draft >= 0 and self.draw(st.integers(0, 4)) > 0:
                tokens[index] = draft
        if tokens and self.draw(st.integers(0, 5)) == 0:
            tokens[self.draw(st.integers(0, count - 1))] = self.draw(st.sampled_from((-1, -1, -2)))
        complete = self._complete(count)
        self.pair.ask(lambda batch: batch.apply(tokens, complete))

    def _complete(self, num_samples: int) -> list[int]:
        if self.draw(st.integers(0, 4)) > 0:
            return []
        chosen = self.draw(st.lists(st.integers(0, max(0, num_samples - 1)), max_size=2))
        wrong = self.draw(st.sampled_from((False,) * 9 + (True,)))
        return [*chosen, -1] if wrong else sorted(set(chosen))

    def step(self) -> None:
        if self.draw(st.booleans()):
            self.draft_all()
        while self.pair.ask(lambda batch: batch.plan(12, 8, 9)) == ("returned", False):
            self.pair.ask(lambda batch: batch.close(SequenceId(batch.sequence_ids()[-1])))
        self.write()
        self.fill_drafts()
        self.apply()

    def abandon(self) -> None:
        self.pair.ask(lambda batch: batch.abandon())

    def forget_cache(self) -> None:
        self.pair.ask(lambda batch: batch.forget_cache())


OPERATIONS = st.lists(
    st.sampled_from(
        (Calls.open,) * 6
        + (Calls.begin,) * 3
        + (Calls.step,) * 6
        + (Calls.plan, Calls.schedule, Calls.write, Calls.apply, Calls.draft) * 2
        + (Calls.step_ahead,) * 5
        + (Calls.fill_drafts, Calls.draft_all, Calls.plan_ahead)
        + (Calls.fork, Calls.fork, Calls.close, Calls.append, Calls.abandon, Calls.forget_cache)
    ),
    min_size=15,
    max_size=40,
)


@given(
    data=st.data(),
    num_blocks=st.integers(3, 16),
    block_size=st.integers(1, 5),
    caching=st.sampled_from((True, True, True, False)),
    host=st.sampled_from((0, 0, 1, 2, 8)),
    operations=OPERATIONS,
)
def test_batches_agree(
    data: st.DataObject,
    num_blocks: int,
    block_size: int,
    caching: bool,
    host: int,
    operations: Sequence[Callable[[Calls], None]],
) -> None:
    calls = Calls(Pair(num_blocks, block_size, caching, host), data)
    for operation in operations:
        operation(calls)


# ------------------------------------------------------------------ schedulers


ENGINE_OPERATIONS = st.lists(
    st.sampled_from(("submit", "submit", "step", "step", "step", "abort", "begin", "fail", "lose")),
    min_size=20,
    max_size=50,
)


def _same(engines: Sequence[Engine], call: Callable[..., object], *arguments: object) -> Outcome:
    left, right = (outcome(partial(call, engine, *arguments)) for engine in engines)
    assert left == right
    assert engines[0].slot == engines[1].slot
    for engine in engines:
        engine.scheduler.check()
    return left


@given(data=st.data(), operations=ENGINE_OPERATIONS, guess_seed=st.integers(0, 4))
def test_schedulers_over_either_batch_agree(
    data: st.DataObject, operations: list[str], guess_seed: int
) -> None:
    num_blocks, budget = data.draw(st.sampled_from(((7, 5), (12, 12))))
    shape = Shape(
        num_blocks=num_blocks,
        max_num_batched_tokens=budget,
        extra_logits=budget - 2,
        guess_seed=guess_seed,
        num_host_blocks=data.draw(st.sampled_from((0, 3))),
        max_transfers=4,
    )
    engines = [Engine(shape, PythonBatch), Engine(shape, NATIVE_BATCH)]
    first, submitted = engines[0], 0
    for operation in operations:
        match operation:
            case "submit":
                request = data.draw(requests(submitted, shape))
                submitted += 1
                _same(engines, Engine.submit, request)
            case "abort":
                target = RequestId(data.draw(st.integers(0, 16 * submitted + 3)))
                _same(engines, Engine.abort, target)
            case "begin" | "step":
                if first.plan is None:
                    _same(engines, Engine.begin)
                if operation == "step" and first.plan is not None:
                    _same(engines, Engine.end)
            case "fail" if first.plan is not None:
                _same(engines, Engine.fail_step, Unavailable("it broke", 100))
            case "lose":
                _same(engines, Engine.lose)
    assert first.run_to_empty() == engines[1].run_to_empty()
    assert first.outputs == engines[1].outputs
    assert first.accepted_drafts == engines[1].accepted_drafts
