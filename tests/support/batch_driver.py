"""Drives a batch, or both twins in lockstep, with a model of what must be true of it.

The model knows each sequence's text and progress, not how blocks are found or given out: that each
row attends to its own text is seen in `kv_memory.KvMemory`, which runs the steps from their bytes.
"""

from array import array
from collections.abc import Iterable, Sequence

import pytest

from batch_lockstep import Lockstep
from batch_model import (
    BatchFactory,
    BatchShape,
    Expected,
    PlannedRow,
    check_budgets,
    check_drafts,
    check_scores,
    expected_pending,
    guessed_token,
    next_token,
    planned_rows,
)
from kv_memory import ExecutedStep, KvMemory, Text
from triptych.engine_core.batch import (
    FINISH_NONE,
    NOT_FINITE,
    UNKNOWN_DRAFT,
    Outcome,
    SequenceRules,
)
from triptych.engine_core.ids import SequenceId
from triptych.engine_core.layout import STEP_HEADER


class BatchDriver(Lockstep):
    """Checks after every call that changes something.

    `guesses`: those of the next plan. `riders` of the planned step: (sequence id, sequence, index
    of the row).
    """

    def __init__(self, shape: BatchShape, factories: Sequence[BatchFactory]) -> None:
        super().__init__(shape, factories)
        self.memory = KvMemory(
            shape.num_blocks, shape.block_size, shape.layout, shape.num_host_blocks
        )
        self.expected: dict[int, Expected] = {}
        self.order: list[int] = []
        self.guesses: dict[int, list[int]] = {}
        self.rows: list[PlannedRow] = []
        self.riders: list[tuple[int, Expected, int]] = []
        self.closed_in_flight: set[int] = set()
        self.written = False
        self.step_id = 0
        self.accepted_drafts = 0

    # ------------------------------------------------------------------ checks

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
        drafted = {row.number for row in self.rows if row.drafts}
        for number in set(self.order) - drafted:
            needed = -(-len(self.expected[number].tokens) // self.shape.block_size)
            assert len(self.table(number)) <= needed, "no blocks but for tokens"

    def check_memory(self) -> None:
        """Between steps: what is computed is in memory, in its own blocks, where nothing is due."""
        due = {target for _, target in self.ask(lambda b: [*b.copies(), *b.loads()])}
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
        assert match.pending == expected_pending(
            tokens, mark, match.computed, self.expected.values(), self.shape
        )
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

    def fork(self, number: int, new: int, rules: SequenceRules, place: int) -> None:
        """Fork; in a planned step in which the other has a row, ride on it. One with drafts in the
        step cannot be forked."""
        if any(row.drafts for row in self.rows if row.number == number):
            with pytest.raises(AssertionError):
                self.ask(lambda b: b.fork(SequenceId(number), SequenceId(new), rules, place))
            self.check()
            return
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
        for index, row in enumerate(self.rows):
            if row.number == number:
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
        self.guesses.pop(number, None)
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

    def draft(self, number: int, tokens: Sequence[int]) -> None:
        self.ask(lambda b: b.draft(SequenceId(number), tokens))
        self.guesses[number] = list(tokens)
        self.check()

    def plan(self, budget: int, most: int, logits_budget: int) -> bool:
        """Plan, and check what every plan must be."""
        self._forget_step()
        planned = self.ask(lambda b: b.plan(budget, most, logits_budget))
        rows = self.ask(lambda b: planned_rows(b, self.expected))
        lacking = [n for n in self.order if self.expected[n].lacking]
        if not planned:
            assert rows == []
            assert len(self.order) > 1 or self.ask(lambda b: b.copies()), "one alone fits"
            self._check_drafts_are_not_why(budget, most, logits_budget)
        else:
            self._note_rows(rows)
            assert [row.number for row in rows] == lacking
            check_budgets(rows, len(self.order), budget, most, logits_budget)
            self._check_drafts(budget, logits_budget)
        self.check()
        return planned

    def _check_drafts_are_not_why(self, budget: int, most: int, logits_budget: int) -> None:
        """Blocks lack without any guess, too."""
        for batch in self.batches:
            for number in self.guesses:
                batch.draft(SequenceId(number), [])
        assert not self.ask(lambda b: b.plan(budget, most, logits_budget))
        for batch in self.batches:
            for number, tokens in self.guesses.items():
                batch.draft(SequenceId(number), tokens)

    def _check_drafts(self, budget: int, logits_budget: int) -> None:
        free, size = self.ask(lambda b: b.num_free_blocks), self.shape.block_size
        tokens_left = max(0, budget - sum(row.num_own for row in self.rows))
        own_logits = [len(row.logits_positions()) - len(row.drafts) for row in self.rows]
        logits_left = max(0, logits_budget - len(self.order))
        logits_left -= sum(max(0, count - 1) for count in own_logits)
        check_drafts(
            self.rows,
            self.guesses,
            tokens_left,
            logits_left,
            lambda row: free == 0 and len(row.text().token_ids) % size == 0,
        )

    def _note_rows(self, rows: Iterable[PlannedRow]) -> None:
        for row in rows:
            assert row.row.start == row.expected.computed
            assert 1 <= row.num_own <= row.expected.lacking
            assert row.row.samples == (row.num_own == row.expected.lacking)
            self.rows.append(row)

    def schedule(self, number: int, most: int) -> int:
        got = self.ask(lambda b: b.schedule(SequenceId(number), most))
        assert 0 <= got <= max(0, min(most, self.expected[number].lacking))
        known = {row.number: row.expected for row in self.rows} | self.expected
        rows = self.ask(lambda b: planned_rows(b, known))
        assert len(rows) == len(self.rows) + (got > 0)
        if got:
            assert (rows[-1].num_own, rows[-1].drafts) == (got, [])
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
        self._guess()
        marks = [row.expected.mark for row in self.rows]
        executed = self.memory.run(self.slots[0], marks)
        assert executed.step_id == self.step_id
        expected_logits: list[Text] = []
        for row, text in zip(self.rows, executed.row_texts, strict=True):
            assert text == row.text(row.row.start + row.row.num_tokens)
            expected_logits += [row.text(position + 1) for position in row.logits_positions()]
        assert executed.logits == expected_logits
        self._check_holders(executed)
        check_scores(self.rows, self.ask(lambda b: b.scores()))
        return executed

    def _guess(self) -> None:
        """What the executor does with unknown drafts, before it computes."""
        filled, at = [], 0
        offset, _ = self.shape.layout.arrays["token_ids"]
        for row in self.rows:
            at += row.num_own
            for index, draft in enumerate(row.drafts):
                if draft == UNKNOWN_DRAFT:
                    before = row.text(row.row.start + row.num_own + index)
                    row.drafts[index] = guessed_token(before)
                    filled.append(row.drafts[index])
                    for slot in self.slots:
                        token = slot[offset + 4 * at : offset + 4 * at + 4].cast("i")
                        assert token[0] == UNKNOWN_DRAFT
                        token[0] = filled[-1]
                at += 1
        assert at == STEP_HEADER.unpack_from(self.slots[0])[1]
        with pytest.raises(ValueError, match="drafts"):
            self.ask(lambda b: b.fill_drafts([*filled, 0]))
        if filled:
            with pytest.raises(ValueError, match="drafts"):
                self.ask(lambda b: b.fill_drafts([*filled[1:], -1]))
        self.ask(lambda b: b.fill_drafts(filled))
        known = self.ask(lambda b: planned_rows(b, {row.number: row.expected for row in self.rows}))
        assert [row.drafts for row in known] == [row.drafts for row in self.rows]

    def _check_holders(self, executed: ExecutedStep) -> None:
        """A block that is written belongs to its row's sequence and those that ride on it."""
        for block, index in executed.writers.items():
            allowed = {number for number, _, row in self.riders if row == index}
            allowed.add(self.rows[index].number)
            for number in self.order:
                assert block not in self.table(number) or number in allowed, (
                    f"{number} has {block} too"
                )

    def samplers(self) -> list[tuple[int, Expected, list[int]]]:
        """Who samples, in the order of samples(), and its drafts."""
        rows = [(row.number, row.expected, row.drafts) for row in self.rows if row.row.samples]
        riders = [(n, e, list[int]()) for n, e, i in self.riders if self.rows[i].row.samples]
        return rows + riders

    def apply(
        self, broken: frozenset[int] = frozenset(), complete: frozenset[int] = frozenset()
    ) -> Outcome:
        """Execute and apply; sample indexes in `broken` (and those of the same logits) have logits
        that are not finite: if those count, what their rows have computed is as broken, and nobody
        may find it. `complete`: sample indexes; those that there are."""
        logits = self.execute().logits
        ids, logits_rows = self.ask(lambda b: b.samples())
        samplers = self.samplers()
        assert ids.tolist() == [n for n, _, drafts in samplers for _ in (n, *drafts)]
        assert ids.typecode == "q"
        assert logits_rows.typecode == "i"
        broken_rows = {row for index, row in enumerate(logits_rows) if index in broken}
        drawn = [NOT_FINITE if r in broken_rows else next_token(logits[r]) for r in logits_rows]
        ends = sorted(index for index in complete if index < len(drawn))
        for row in self.rows:
            row.expected.computed += row.num_own
        for _, expected, index in self.riders:
            expected.computed += self.rows[index].num_own
        entries, finished = self._expect_outcome(samplers, drawn, ends)
        broken_ids = {ids[sample] for sample, _, token, _ in entries if token == NOT_FINITE}
        self.memory.spoil(self.slots[0], [row.number in broken_ids for row in self.rows])
        outcome = self.ask(lambda b: b.apply(drawn, ends))
        assert outcome.samples == array("i", [sample for sample, _, _, _ in entries])
        assert outcome.request_ids == array("q", [request for _, request, _, _ in entries])
        assert outcome.token_ids == array("i", [token for _, _, token, _ in entries])
        assert outcome.finishes == array("B", [finish for _, _, _, finish in entries])
        assert list(zip(outcome.finished, outcome.finished_tokens, strict=True)) == finished
        self.accepted_drafts += len(entries) - len(samplers)
        self._forget_step()
        self.guesses.clear()
        for number in broken_ids & set(self.order):
            self.close(number)  # held ones: their scheduler gives them up
        self.check()
        self.check_memory()
        return outcome

    def _expect_outcome(
        self,
        samplers: Sequence[tuple[int, Expected, list[int]]],
        drawn: Sequence[int],
        complete: Sequence[int],
    ) -> tuple[list[tuple[int, int, int, int]], list[tuple[int, int]]]:
        """Entries (sample, request, token, finish) and finished (sequence, tokens); taken into the
        model."""
        entries: list[tuple[int, int, int, int]] = []
        finished, first = [], 0
        for number, expected, drafts in samplers:
            wanted = number not in self.closed_in_flight and not expected.rules.held
            for sample, draft in enumerate([*drafts, None], first):
                token, finish, request = drawn[sample], FINISH_NONE, -1
                if token == NOT_FINITE:
                    expected.cached = False
                if wanted:
                    finish = expected.take(token, complete=sample in complete)
                    request = expected.rules.request_id
                entries.append((sample, request, token, finish))
                if finish:
                    finished.append((number, len(expected.tokens)))
                    del self.expected[number]
                    self.order.remove(number)
                if finish or not wanted or token != draft:
                    break
                expected.computed += 1
            first += 1 + len(drafts)
        return entries, finished

    def abandon(self) -> None:
        self.ask(lambda b: b.abandon())
        self._forget_step()
        self.guesses.clear()
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
