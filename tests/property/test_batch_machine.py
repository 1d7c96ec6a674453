"""Any order of calls: every row attends to its own text, and every block comes back."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from batch_driver import BatchDriver
from batch_model import VOCABULARY, BatchShape
from batch_twins import TWINS
from triptych.engine_core.batch import SequenceRules

SHAPES = st.builds(
    BatchShape,
    num_blocks=st.integers(6, 20),
    block_size=st.integers(1, 4),
    prefix_caching=st.sampled_from((True, True, True, False)),
    num_host_blocks=st.sampled_from((0, 1, 3, 12)),
    max_transfers=st.sampled_from((0, 1, 2, 20)),
)
MAX_OPEN = 7


class BatchMachine(RuleBasedStateMachine):
    """Texts over few tokens, often an earlier one continued: blocks are found and shared."""

    def __init__(self) -> None:
        super().__init__()
        self.next_id = 0
        self.texts = [[0] * 9, [0, 1, 2, 0, 1, 2]]  # those that texts begin with

    @initialize(shape=SHAPES)
    def start(self, shape: BatchShape) -> None:
        self.driver = BatchDriver(shape, TWINS)

    def _rules(self, data: st.DataObject, num_prompt: int) -> SequenceRules:
        self.next_id += 1
        return SequenceRules(
            request_id=1000 + self.next_id,
            num_prompt=num_prompt,
            max_tokens=data.draw(st.integers(1, 8)),
            max_len=self._max_len,
            stop_token_ids=data.draw(st.sampled_from(((), (), (0,), (0, 2)))),
            held=data.draw(st.sampled_from((False, False, True))),
            score_prompt=data.draw(st.sampled_from((False, False, False, True))),
            cached=data.draw(st.sampled_from((True, True, True, True, True, False))),
        )

    @property
    def _max_len(self) -> int:
        shape = self.driver.shape
        return min(shape.max_len, shape.num_blocks * shape.block_size)

    @precondition(lambda self: not self.driver.written and len(self.driver.order) < MAX_OPEN)
    @rule(data=st.data())
    def open(self, data: st.DataObject) -> None:
        self._open(data)
        if not self.driver.rows and data.draw(st.booleans()):
            self.step(data.draw(st.integers(1, 14)), data.draw(st.integers(1, 4)))

    def _open(self, data: st.DataObject) -> None:
        start = data.draw(st.sampled_from(self.texts))
        kept = len(start) - data.draw(st.sampled_from((0, 0, 0, 1, 2, 5)))
        more = data.draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=3))
        tokens = [*start[: max(0, kept)], *more][: self._max_len - 1] or [0]
        rules = self._rules(data, data.draw(st.integers(1, len(tokens))))
        place = data.draw(st.integers(0, len(self.driver.order)))
        mark = data.draw(st.sampled_from(("", "", "", "", "", "salt")))
        spare = data.draw(st.sampled_from((0, 0, 0, 0, 2)))
        # Its prompt is the first num_prompt tokens: the others are output of its former life.
        rules = rules._replace(max_tokens=rules.max_tokens + len(tokens) - rules.num_prompt)
        self.driver.open(self.next_id, tokens, mark, rules, place, spare)
        self._remember(tokens)

    def _remember(self, tokens: list[int]) -> None:
        self.texts = [*self.texts[:2], *self.texts[2:][-2:], tokens]

    @precondition(lambda self: 0 < len(self.driver.order) < MAX_OPEN)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.driver.order))
        expected = self.driver.expected[parent]
        rules = self._rules(data, expected.rules.num_prompt)
        num_output = len(expected.tokens) - rules.num_prompt
        rules = rules._replace(max_tokens=rules.max_tokens + num_output)
        if expected.computed == len(expected.tokens):
            rules = rules._replace(held=True)  # only a held one may lack no token
        place = data.draw(st.integers(0, len(self.driver.order)))
        self.driver.fork(parent, self.next_id, rules, place)
        if not self.driver.rows and data.draw(st.booleans()):
            self.driver.step(data.draw(st.integers(1, 14)))

    @precondition(lambda self: self.driver.order and not self.driver.rows)
    @rule(data=st.data(), count=st.integers(1, 4))
    def append(self, data: st.DataObject, count: int) -> None:
        held = [n for n in self.driver.order if self.driver.expected[n].rules.held]
        for number in held[:count]:
            if len(self.driver.expected[number].tokens) < self._max_len - 1:
                self.driver.append(number, data.draw(st.integers(0, VOCABULARY - 1)))
        self.driver.step(data.draw(st.integers(1, 14)))

    @precondition(lambda self: self.driver.order)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.driver.order))
        self._remember(self.driver.expected[number].tokens)
        self.driver.close(number)

    @precondition(lambda self: not self.driver.written and self._may_draft())
    @rule(data=st.data(), step=st.booleans())
    def draft(self, data: st.DataObject, step: bool) -> None:
        for number in self._may_draft():
            guesses = self.driver.expected[number].guesses(
                data.draw(st.integers(0, 6)),
                data.draw(st.sampled_from((0, 1, 2, 6, 6))),
                unknown=data.draw(st.booleans()),
            )
            self.driver.draft(number, guesses)
        if step:
            self.driver.step(data.draw(st.integers(1, 14)))

    def _may_draft(self) -> list[int]:
        return [n for n in self.driver.order if self.driver.expected[n].may_draft]

    @precondition(lambda self: self.driver.order and not self.driver.written)
    @rule(
        budget=st.integers(1, 14),
        most=st.integers(1, 8),
        logits=st.integers(1, 12),
        new=st.booleans(),
        data=st.data(),
    )
    def plan(self, budget: int, most: int, logits: int, new: bool, data: st.DataObject) -> None:
        while not self.driver.plan(budget, most, logits):
            self.driver.close(self.driver.order[-1])
        if new and len(self.driver.order) < MAX_OPEN:
            self._open(data)
        for number in list(self.driver.order):
            if self.driver.row_index(number) is None and data.draw(st.booleans()):
                self.driver.schedule(number, data.draw(st.integers(0, most)))

    @precondition(lambda self: self.driver.rows and not self.driver.written)
    @rule()
    def write(self) -> None:
        self.driver.write()

    @precondition(lambda self: self.driver.written)
    @rule(
        broken=st.sampled_from((frozenset(), frozenset(), frozenset({0}), frozenset({1, 2}))),
        complete=st.sampled_from((frozenset(), frozenset(), frozenset({0}), frozenset({1, 3}))),
    )
    def apply(self, broken: frozenset[int], complete: frozenset[int]) -> None:
        self.driver.apply(broken, complete)

    @precondition(lambda self: self.driver.order and not self.driver.written)
    @rule(budget=st.integers(1, 14), steps=st.integers(1, 4))
    def step(self, budget: int, steps: int) -> None:
        for _ in range(steps):
            self.driver.step(budget)

    @precondition(lambda self: self.driver.rows)
    @rule(executed=st.booleans())
    def abandon(self, executed: bool) -> None:
        if executed and self.driver.written:
            self.driver.execute()  # computed, but nobody heard of it
        self.driver.abandon()

    @rule(tenth=st.integers(0, 9))
    def forget_cache(self, tenth: int) -> None:
        if tenth == 0:
            self.driver.forget_cache()

    @invariant()
    def memory_holds(self) -> None:
        if hasattr(self, "driver") and not self.driver.rows:
            self.driver.check_memory()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.close_all()


TestBatchMachine = BatchMachine.TestCase
TestBatchMachine.settings = settings(stateful_step_count=40)
