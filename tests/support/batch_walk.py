"""A random walk over a batch's calls: a running engine's life, but denser in what goes wrong.

Faster than a hypothesis machine by far, so that rare meetings of rare events are met; a failing
seed is run again as it was.
"""

import random
from collections.abc import Sequence

from batch_driver import BatchDriver
from batch_model import VOCABULARY, BatchFactory, BatchShape
from triptych.engine_core.batch import SequenceRules

MAX_OPEN = 7


class BatchWalk:
    """One walk, all of whose choices come from the seed."""

    def __init__(self, seed: int, factories: Sequence[BatchFactory]) -> None:
        self._random = random.Random(seed)
        choose = self._random
        shape = BatchShape(
            num_blocks=choose.randint(5, 20),
            block_size=choose.choice((1, 2, 2, 3, 4)),
            max_len=choose.choice((12, 20)),
            prefix_caching=choose.random() < 0.9,
        )
        self.driver = BatchDriver(shape, factories)
        self._max_len = min(shape.max_len, shape.num_blocks * shape.block_size)
        self._budgets = choose.choice(((1, 3, 6, 100), (3, 20, 100, 100)))
        self._next_id = 0
        self._texts = [[0] * 9, [0, 1, 2, 0, 1, 2]]

    def run(self, num_rounds: int) -> None:
        """So many steps, applied or not; then everything is closed and all blocks are free."""
        for _ in range(num_rounds):
            self._between_steps()
            self._plan()
            if self.driver.rows:
                self._in_flight()
        self.driver.close_all()

    def _chance(self, probability: float) -> bool:
        return self._random.random() < probability

    # ------------------------------------------------------------------ calls, by phase

    def _between_steps(self) -> None:
        while self._chance(0.5):
            self._open()
        while self._chance(0.25):
            self._fork()
        while self._chance(0.25):
            self._close()
        for number, expected in list(self.driver.expected.items()):
            if expected.rules.held and len(expected.tokens) < self._max_len - 1:
                for _ in range(self._random.choice((0, 1, 1, 1, 2))):
                    self.driver.append(number, self._random.randrange(VOCABULARY))
        if self._chance(0.02):
            self.driver.forget_cache()

    def _plan(self) -> None:
        choose = self._random
        while True:
            self._draft()
            budget, most = choose.choice(self._budgets), choose.choice((1, 2, 4, 100))
            while not self.driver.plan(budget, most, choose.choice(self._budgets)):
                self.driver.close(self.driver.order[-1])
            while self._chance(0.3):
                self._open()
            while self._chance(0.2):
                self._fork()
            for number in list(self.driver.order):
                if self.driver.row_index(number) is None and self._chance(0.8):
                    self.driver.schedule(number, choose.choice((0, 1, 3, 100)))
            if self._chance(0.95):
                break

    def _draft(self) -> None:
        choose = self._random
        for number, expected in self.driver.expected.items():
            if expected.may_draft and self._chance(0.8):
                length, num_right = choose.randint(0, 6), choose.choice((0, 1, 2, 6, 6))
                unknown = self._chance(0.3)
                self.driver.draft(number, expected.guesses(length, num_right, unknown=unknown))

    def _in_flight(self) -> None:
        self._disturb(0.15)
        if self._chance(0.05):
            self.driver.abandon()
            return
        self.driver.write()
        self._disturb(0.1)
        if self._chance(0.05):
            if self._chance(0.5):
                self.driver.execute()  # computed, but nobody heard of it
            self.driver.abandon()
            return
        broken = frozenset({self._random.randrange(6)}) if self._chance(0.1) else frozenset[int]()
        complete = frozenset({self._random.randrange(9)}) if self._chance(0.1) else frozenset[int]()
        for expected in self.driver.expected.values() if broken else ():
            self._remember(expected.tokens)
        self.driver.apply(broken, complete)

    def _disturb(self, probability: float) -> None:
        while self._chance(probability):
            self._fork()
        while self._chance(probability):
            self._close()
        if self._chance(probability / 10):
            self.driver.forget_cache()

    # ------------------------------------------------------------------ single calls

    def _rules(self, num_tokens: int, num_prompt: int) -> SequenceRules:
        choose = self._random
        self._next_id += 1
        return SequenceRules(
            request_id=1000 + self._next_id,
            num_prompt=num_prompt,
            max_tokens=choose.randint(1, 12) + num_tokens - num_prompt,
            max_len=self._max_len,
            stop_token_ids=choose.choice(((), (), (0,), (0, 2))),
            held=self._chance(0.3),
            score_prompt=self._chance(0.15),
            cached=self._chance(0.9),
        )

    def _place(self) -> int:
        return self._random.randint(0, len(self.driver.order))

    def _open(self) -> None:
        choose, driver = self._random, self.driver
        if len(driver.order) >= MAX_OPEN:
            return
        start = choose.choice(self._texts)
        start = start[: max(0, len(start) - choose.choice((0, 0, 0, 1, 2, 5, 8)))]
        more = [choose.randrange(VOCABULARY) for _ in range(choose.choice((0, 0, 1, 3)))]
        tokens = [*start, *more][: self._max_len - 1] or [0]
        rules = self._rules(len(tokens), choose.randint(1, len(tokens)))
        mark = "" if self._chance(0.9) else "salt"
        driver.open(self._next_id, tokens, mark, rules, self._place(), choose.choice((0, 0, 0, 2)))
        self._remember(tokens)

    def _fork(self) -> None:
        if not 0 < len(self.driver.order) < MAX_OPEN:
            return
        parent = self._random.choice(self.driver.order)
        expected = self.driver.expected[parent]
        rules = self._rules(len(expected.tokens), expected.rules.num_prompt)
        if expected.computed == len(expected.tokens):
            rules = rules._replace(held=True)  # only a held one may lack no token
        self.driver.fork(parent, self._next_id, rules, self._place())

    def _close(self) -> None:
        if self.driver.order:
            number = self._random.choice(self.driver.order)
            self._remember(self.driver.expected[number].tokens)
            self.driver.close(number)

    def _remember(self, tokens: list[int]) -> None:
        self._texts = [*self._texts[:2], *self._texts[2:][-2:], list(tokens)]
