"""Drives a batch, or both twins in lockstep, with a model of what must be true of it.

The model knows each sequence's text and progress, not how blocks are found or given out: that each
row attends to its own text is seen in `kv_memory.KvMemory`, which runs the steps from their bytes.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from batch_model import BatchFactory, BatchShape, Expected, facts, next_token
from kv_memory import ExecutedStep, KvMemory, Text
from triptych.engine_core.batch import FINISH_NONE, NOT_FINITE, Batch, Outcome, SequenceRules
from triptych.engine_core.ids import SequenceId
from triptych.engine_core.step import ScheduledSequence

Answer = TypeVar("Answer")


@dataclass
class BatchDriver:
    """Checks after every call that changes something."""

    shape: BatchShape
    factories: Sequence[BatchFactory]
    expected: dict[int, Expected] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    rows: list[tuple[Expected, ScheduledSequence]] = field(default_factory=list)
    riders: list[tuple[int, Expected, int]] = field(default_factory=list)
    """Of the planned step: (sequence id, sequence, index of the row)."""
    closed_in_flight: set[int] = field(default_factory=set)
    written: bool = False

    def __post_init__(self) -> None:
        shape, layout = self.shape, self.shape.layout
        self.batches = [
            factory(shape.num_blocks, shape.block_size, layout, shape.prefix_caching)
            for factory in self.factories
        ]
        self.memory = KvMemory(shape.num_blocks, shape.block_size, layout)
        self.slots = [memoryview(bytearray(layout.slot_bytes)) for _ in self.batches]
        self.step_id = 0

    # ------------------------------------------------------------------ lockstep

    def ask(self, call: Callable[[Batch], Answer]) -> Answer:
        """What all twins answer, or raise."""
        answers, errors = [], []
        for batch in self.batches:
            try:
                answers.append(call(batch))
            except (AssertionError, KeyError, OverflowError, ValueError) as error:
                errors.append(error)
        if errors:
            types = {type(error) for error in errors}
            assert len(types) == 1, f"twins raise {types}"
            assert not answers, f"one twin raised {errors[0]!r}, another answered {answers[0]}"
            raise errors[0]
        assert all(answer == answers[0] for answer in answers), f"twins differ: {answers}"
        return answers[0]

    def facts(self) -> tuple[object, ...]:
        """Everything that can be seen from outside."""
        return self.ask(facts)

    def table(self, number: int) -> list[int]:
        return self.ask(lambda b: b.table(SequenceId(number)))

    def check(self) -> None:
        """The twins' own invariants, and that they are where the model is."""
        for batch in self.batches:
            batch.check()
        self.facts()
        assert self.ask(lambda b: b.sequence_ids()) == self.order
        tokens = self.ask(lambda b: [b.token_ids(SequenceId(n)) for n in self.order])
        computed = self.ask(lambda b: [b.num_computed(SequenceId(n)) for n in self.order])
        assert tokens == [self.expected[number].tokens for number in self.order]
        assert computed == [self.expected[number].computed for number in self.order]

    def check_memory(self) -> None:
        """Between steps, with no copies due: what is computed is in memory, in its own blocks."""
        due = {target for _, target in self.ask(lambda b: b.copies())}
        for number, expected in self.expected.items():
            table = self.table(number)
            held = self.memory.table_texts(table, expected.computed)
            for position, text in enumerate(held):
                if table[position // self.shape.block_size] not in due:
                    assert text == expected.text(position + 1), (
                        f"sequence {number} position {position} holds {text}"
                    )

    # ------------------------------------------------------------------ sequences

    def open(
        self,
        number: int,
        tokens: Sequence[int],
        mark: str,
        rules: SequenceRules,
        place: int,
        spare: int,
    ) -> int:
        """Open, and hold the answer against what `match` says just before."""
        digests = self.ask(lambda b: b.prefix_digests(tokens, mark.encode()))
        before = self.facts()
        match = self.ask(lambda b: b.match(tokens, digests))
        assert self.facts() == before, "match changes nothing"
        assert match.pending == self._expected_pending(tokens, mark, match.computed)
        free = self.ask(lambda b: b.num_free_blocks)
        computed = self.ask(
            lambda b: b.open(SequenceId(number), tokens, digests, rules, place, spare)
        )
        if computed < 0:
            assert self.facts() == before, "an open that is refused changes nothing"
            assert free - -(-len(tokens) // self.shape.block_size) < spare, "refused for no reason"
            return computed
        assert self.ask(lambda b: b.num_free_blocks) >= spare
        cached = rules.cached and self.shape.prefix_caching
        whole = match.computed // self.shape.block_size * self.shape.block_size
        allowed = {match.computed, whole} if cached and not rules.score_prompt else {0}
        assert computed in allowed, f"{computed} computed, {match} was promised"
        self.expected[number] = Expected(mark, list(tokens), rules, computed, cached)
        self.order.insert(place, number)
        self.check()
        return computed

    def _expected_pending(self, tokens: Sequence[int], mark: str, computed: int) -> int:
        size, most = self.shape.block_size, len(tokens) - 1
        coming: set[Text] = set()
        for other in self.expected.values():
            if other.cached:
                first = other.computed // size
                ends = range((first + 1) * size, len(other.tokens) + 1, size)
                coming.update(other.text(end) for end in ends)
        whole = computed // size
        # A partial hit may reach the last token but one of a block that could not be a whole hit.
        end = whole
        while (end + 1) * size <= len(tokens) and Text(
            mark, tuple(tokens[: (end + 1) * size])
        ) in coming:
            end += 1
        return max(0, min(end * size, most) - computed) if self.shape.prefix_caching else 0

    def fork(self, number: int, new: int, rules: SequenceRules, place: int) -> None:
        """Fork; in a planned step in which the other has a row, ride on it."""
        self.ask(lambda b: b.fork(SequenceId(number), SequenceId(new), rules, place))
        parent = self.expected[number]
        child = Expected(
            parent.mark, list(parent.tokens), rules, parent.computed, parent.cached and rules.cached
        )
        self.expected[new] = child
        self.order.insert(place, new)
        index = self.row_index(number)
        if index is not None:
            self.riders.append((new, child, index))
        self.check()

    def row_index(self, number: int) -> int | None:
        for index, (_, row) in enumerate(self.rows):
            if row.sequence_id == number:
                return index
        return next((index for rider, _, index in self.riders if rider == number), None)

    def append(self, number: int, token: int) -> None:
        self.ask(lambda b: b.append(SequenceId(number), token))
        self.expected[number].tokens.append(token)
        self.check()

    def close(self, number: int) -> None:
        self.ask(lambda b: b.close(SequenceId(number)))
        del self.expected[number]
        self.order.remove(number)
        if self.rows:
            self.closed_in_flight.add(number)
        self.check()

    def forget_cache(self) -> None:
        self.ask(lambda b: b.forget_cache())
        assert self.ask(lambda b: b.num_cached_blocks) == 0
        for expected in self.expected.values():
            expected.cached = False
        self.check()

    # ------------------------------------------------------------------ a step

    def plan(self, budget: int, most: int, logits_budget: int) -> bool:
        """Plan, and check what every plan must be."""
        self._forget_step()
        planned = self.ask(lambda b: b.plan(budget, most, logits_budget))
        rows = self.ask(lambda b: b.rows())
        lacking = [n for n in self.order if self.expected[n].lacking]
        if not planned:
            assert rows == []
            assert len(self.order) > 1 or self.ask(lambda b: b.copies()), "one alone fits"
        else:
            self._note_rows(rows)
            assert [row.sequence_id for row in rows] == lacking
            self._check_budgets(rows, budget, most, logits_budget)
        self.check()
        return planned

    def _note_rows(self, rows: Iterable[ScheduledSequence]) -> None:
        for row in rows:
            expected = self.expected[row.sequence_id]
            assert row.start == expected.computed
            assert 1 <= row.num_tokens <= self.expected[row.sequence_id].lacking
            assert row.samples == (row.num_tokens == self.expected[row.sequence_id].lacking)
            self.rows.append((expected, row))

    def _check_budgets(
        self, rows: Sequence[ScheduledSequence], budget: int, most: int, logits_budget: int
    ) -> None:
        assert self.num_tokens <= max(budget, len(rows))
        assert all(row.num_tokens <= most for row in rows)
        num_logits = sum(len(e.logits_positions(row)) for e, row in self.rows)
        assert num_logits <= max(logits_budget, len(self.order))
        left = max(0, budget - sum(row.num_tokens for row in rows))
        for row in rows:
            rules = self.expected[row.sequence_id].rules
            wanted = min(self.expected[row.sequence_id].lacking, most)
            if not rules.score_prompt and row.num_tokens < wanted:
                later = rows[rows.index(row) + 1 :]
                assert left == 0, "tokens are left though one that lacks some got fewer"
                assert all(r.num_tokens == 1 for r in later), "the first in order come first"

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for _, row in self.rows)

    def schedule(self, number: int, most: int) -> int:
        got = self.ask(lambda b: b.schedule(SequenceId(number), most))
        assert 0 <= got <= max(0, min(most, self.expected[number].lacking))
        rows = self.ask(lambda b: b.rows())
        assert len(rows) == len(self.rows) + (got > 0)
        if got:
            assert rows[-1].num_tokens == got
            self._note_rows(rows[-1:])
        self.check()
        return got

    def write(self) -> None:
        """Write the step, into slots full of what was there before."""
        self.step_id += 1
        for batch, slot in zip(self.batches, self.slots, strict=True):
            batch.write(slot, self.step_id)
        assert len({bytes(slot) for slot in self.slots}) == 1, "twins write the same bytes"
        self.written = True
        self.check()

    def execute(self) -> ExecutedStep:
        """Run the written step in memory: each row, and each row of logits, is of its own text."""
        rows = [row for _, row in self.rows]
        executed = self.memory.run(self.slots[0], [expected.mark for expected, _ in self.rows])
        assert executed.step_id == self.step_id
        expected_logits: list[Text] = []
        for (expected, row), text in zip(self.rows, executed.row_texts, strict=True):
            assert text == expected.text(row.start + row.num_tokens)
            positions = expected.logits_positions(row)
            expected_logits += [expected.text(position + 1) for position in positions]
        assert executed.logits == expected_logits
        self._check_holders(rows, executed)
        self._check_scores()
        return executed

    def _check_holders(self, rows: Sequence[ScheduledSequence], executed: ExecutedStep) -> None:
        """A block that is written belongs to its row's sequence and those that ride on it."""
        for block, index in executed.writers.items():
            allowed = {number for number, _, row in self.riders if row == index}
            allowed.add(rows[index].sequence_id)
            for number in self.order:
                assert block not in self.table(number) or number in allowed, (
                    f"{number} has {block} too"
                )

    def _check_scores(self) -> None:
        scores = self.ask(lambda b: b.scores())
        found = {score.sequence_id: score for score in scores}
        first = 0
        for expected, row in self.rows:
            positions = expected.logits_positions(row)
            num_scored = len(positions) - row.samples
            score = found.pop(row.sequence_id, None)
            assert (score is not None) == (num_scored > 0)
            if score is not None:
                assert score[1:] == (first, row.start, num_scored)
            first += len(positions)
        assert not found

    def samplers(self) -> list[tuple[int, Expected]]:
        """Who samples, in the order of samples()."""
        rows = [(int(row.sequence_id), expected) for expected, row in self.rows if row.samples]
        riders = [(n, e) for n, e, index in self.riders if self.rows[index][1].samples]
        return rows + riders

    def apply(self, broken: frozenset[int] = frozenset()) -> Outcome:
        """Execute and apply; sample indexes in `broken` (and those of the same logits) have logits
        that are not finite, and what their rows have computed is as broken: nobody may find it."""
        logits = self.execute().logits
        ids, logits_rows = self.ask(lambda b: b.samples())
        samplers = self.samplers()
        assert ids.tolist() == [number for number, _ in samplers]
        assert ids.typecode == "q"
        assert logits_rows.typecode == "i"
        broken_rows = {row for index, row in enumerate(logits_rows) if index in broken}
        drawn = []
        for (_, expected), logits_row in zip(samplers, logits_rows, strict=True):
            assert logits[logits_row] == expected.text(), "a sample is from its own text"
            token = next_token(logits[logits_row])
            drawn.append(NOT_FINITE if logits_row in broken_rows else token)
        broken_ids = {n for (n, _), t in zip(samplers, drawn, strict=True) if t == NOT_FINITE}
        self.memory.spoil(self.slots[0], [row.sequence_id in broken_ids for _, row in self.rows])
        outcome = self.ask(lambda b: b.apply(drawn))
        for expected, row in self.rows:
            expected.computed += row.num_tokens
        for _, expected, index in self.riders:
            expected.computed += self.rows[index][1].num_tokens
        closed = self.closed_in_flight
        self._forget_step()
        self._check_outcome(outcome, samplers, drawn, closed)
        for number in broken_ids & set(self.order):
            self.close(number)  # held ones: their scheduler gives them up
        self.check()
        self.check_memory()
        return outcome

    def _check_outcome(
        self,
        outcome: Outcome,
        samplers: Sequence[tuple[int, Expected]],
        drawn: Sequence[int],
        closed: set[int],
    ) -> None:
        requests, finishes, finished = [], [], []
        for (number, expected), token in zip(samplers, drawn, strict=True):
            if token == NOT_FINITE:
                expected.cached = False
            nobody = number in closed or expected.rules.held
            requests.append(-1 if nobody else expected.rules.request_id)
            finish = FINISH_NONE if nobody else expected.take(token)
            finishes.append(finish)
            if finish:
                finished.append((number, len(expected.tokens)))
                del self.expected[number]
                self.order.remove(number)
        assert outcome.request_ids == array("q", requests)
        assert outcome.token_ids == array("i", drawn)
        assert outcome.finishes == array("B", finishes)
        assert list(zip(outcome.finished, outcome.finished_tokens, strict=True)) == finished

    def abandon(self) -> None:
        self.ask(lambda b: b.abandon())
        self._forget_step()
        self.check()

    def _forget_step(self) -> None:
        self.rows, self.riders, self.closed_in_flight, self.written = [], [], set(), False

    def step(self, budget: int = 1000, broken: frozenset[int] = frozenset()) -> Outcome | None:
        """Plan, closing the last in order while blocks lack; write, execute, apply."""
        while not self.plan(budget, budget, budget):
            self.close(self.order[-1])
        if not self.rows:
            return None
        self.write()
        return self.apply(broken)

    def close_all(self) -> None:
        """End the step and every sequence: all blocks are free again."""
        if self.written:
            self.apply()
        elif self.rows:
            self.abandon()
        for number in list(self.order):
            self.close(number)
        assert self.ask(lambda b: b.num_free_blocks) == self.shape.num_blocks
        assert self.ask(lambda b: b.copies()) == []
