"""The running sequences in plain Python: what batch.Batch means, written to be read.

Every order is part of the meaning (the C++ twin keeps to it, call by call): which block is taken
first (block_tables.py), what is found (prefix_cache.py), who samples when (planned_step.py), which
drawn tokens count (taken_tokens.py), and what is given back in which order (`apply` below).
"""

from array import array
from collections.abc import Sequence

from triptych.engine_core.batch import (
    FINISH_NONE,
    NOT_FINITE,
    Match,
    Outcome,
    Score,
    SequenceRules,
)
from triptych.engine_core.block_tables import BlockTables
from triptych.engine_core.ids import BlockId, SequenceId
from triptych.engine_core.layout import StepLayout
from triptych.engine_core.planned_step import PlannedStep
from triptych.engine_core.planning import plan_step, prepare
from triptych.engine_core.prefix_cache import Hit, chain_digests, root_digest, split_digests
from triptych.engine_core.running import RunningSequence
from triptych.engine_core.running_order import RunningOrder
from triptych.engine_core.slot_writer import write_slot
from triptych.engine_core.step import ScheduledSequence
from triptych.engine_core.taken_tokens import TakenTokens, taken_tokens


class PythonBatch:
    """Fits batch.Batch.

    A planned step with rows is in flight. `_closing` holds the sequences that were closed in
    flight, in that order: no longer in `_open`, but with their blocks. `_guesses`: those that the
    next plan, which may be tried again, fits in.
    """

    def __init__(
        self, num_blocks: int, block_size: int, layout: StepLayout, prefix_caching: bool = True
    ) -> None:
        self._tables = BlockTables(num_blocks, block_size)
        self._layout = layout
        self._prefix_caching = prefix_caching
        self._open = RunningOrder(block_size)
        self._closing: list[RunningSequence] = []
        self._step = PlannedStep()
        self._guesses: dict[SequenceId, array[int]] = {}
        self.prefix_queries_total = 0
        self.prefix_hits_total = 0

    # ------------------------------------------------------------------ sequences

    def prefix_digests(self, token_ids: Sequence[int], salt: bytes) -> bytes:
        """The root and the digests of the whole blocks; empty without prefix caching."""
        if not self._prefix_caching:
            return b""
        root = root_digest(salt)
        return b"".join([root, *chain_digests(root, token_ids, self.block_size)])

    def match(self, token_ids: Sequence[int], digests: bytes) -> Match:
        """Look a text up; nothing changes. What is pending ends where `computed` may end."""
        if not self._prefix_caching:
            return Match(0, 0)
        chain = split_digests(digests, len(token_ids), self.block_size)
        hit = self._tables.cache.lookup(token_ids, chain)
        computed = len(hit.blocks) * self.block_size + hit.num_copied
        end = len(hit.blocks) + self._open.num_pending(chain[len(hit.blocks) + 1 :])
        reach = min(end * self.block_size, len(token_ids) - 1)
        return Match(computed, max(0, reach - computed))

    def open(
        self,
        sequence_id: SequenceId,
        token_ids: Sequence[int],
        digests: bytes,
        rules: SequenceRules,
        place: int,
        spare_blocks: int,
    ) -> int:
        """Begin to run; tokens computed already, or -1 for lack of blocks.

        The part of a block that would be copied is done without where there is room only so: its
        source takes one block more.
        """
        assert not self._step.is_written, "open: the step is written"
        assert len(token_ids) > 0, "open: no tokens"
        self._open.check_new(sequence_id, place)
        cached = rules.cached and self._prefix_caching
        chain = split_digests(digests, len(token_ids), self.block_size) if cached else []
        looked_up = cached and not rules.score_prompt
        hit = self._tables.cache.lookup(token_ids, chain) if looked_up else Hit([], None, 0)
        sequence = RunningSequence(sequence_id, token_ids, rules, [], 0, chain)
        table = self._tables.open(len(token_ids), hit, spare_blocks)
        if table is None and hit.source is not None:
            hit = Hit(hit.blocks, None, 0)
            table = self._tables.open(len(token_ids), hit, spare_blocks)
        if table is None:
            return -1
        sequence.table = table
        sequence.num_computed = len(hit.blocks) * self.block_size + hit.num_copied
        if looked_up:
            self.prefix_queries_total += len(token_ids)
            self.prefix_hits_total += sequence.num_computed
        self._open.enter(sequence, place)
        return sequence.num_computed

    def fork(
        self, sequence_id: SequenceId, new_id: SequenceId, rules: SequenceRules, place: int
    ) -> None:
        """Begin to run with the tokens, blocks and progress of another, and on its row if it has
        one in the planned step, which has no drafts. It is cached only if the other one is."""
        parent = self._open[sequence_id]
        self._open.check_new(new_id, place)
        row = self._step.row_of(parent)
        assert row is None or not row.drafts, f"fork: sequence {sequence_id} has drafts in the step"
        digests = list(parent.digests) if parent.cached and rules.cached else []
        table = self._tables.share(parent.table)
        sequence = RunningSequence(
            new_id, parent.token_ids, rules, table, parent.num_computed, digests
        )
        self._open.enter(sequence, place)
        if row is not None:
            self._step.ride(sequence, row)

    def append(self, sequence_id: SequenceId, token_id: int) -> None:
        """The next token of a held sequence, between steps."""
        sequence = self._open[sequence_id]
        assert sequence.rules.held, f"append: sequence {sequence_id} is not held"
        assert not self._step.rows, "append: a step is in flight"
        self._open.append(sequence, token_id)

    def close(self, sequence_id: SequenceId) -> None:
        """Cease to run; what is held is given back now, or when the step in flight is over."""
        sequence = self._open.leave(sequence_id)
        self._guesses.pop(sequence_id, None)
        if self._step.rows:
            self._closing.append(sequence)
        else:
            self._release(sequence)

    def _release(self, sequence: RunningSequence) -> None:
        """Give the blocks back; what of the last one is computed can be found."""
        whole, part = divmod(sequence.num_computed, self.block_size)
        if sequence.cached and part:
            tokens = sequence.token_ids[whole * self.block_size : sequence.num_computed]
            self._tables.keep_partial(
                sequence.table, sequence.num_computed, sequence.digests[whole], tokens
            )
        self._tables.release(sequence.table)

    def draft(self, sequence_id: SequenceId, token_ids: Sequence[int]) -> None:
        """Guesses of what follows, until the step that has them is over; the last call counts."""
        guesses, sequence = array("i", token_ids), self._open[sequence_id]
        assert not self._step.is_written, "draft: the step is written"
        sequence.check_guesses(guesses)
        self._guesses[sequence_id] = guesses

    # ------------------------------------------------------------------ a step

    def plan(self, budget: int, most_per_sequence: int, logits_budget: int) -> bool:
        """Rows for the running sequences, in order; False, with no rows, if blocks lack.

        Those that have got their blocks before one of them finds none keep them.
        """
        assert not self._step.is_written, "plan: the step is written"
        assert most_per_sequence >= 1, f"most_per_sequence: {most_per_sequence} is below 1"
        self._end_step()
        step = plan_step(
            self._open, self._guesses, self._tables, budget, most_per_sequence, logits_budget
        )
        self._step = step or PlannedStep()
        return step is not None

    def schedule(self, sequence_id: SequenceId, most: int) -> int:
        """A row for a sequence without one; the tokens it got, 0 and no row where none fits."""
        sequence, step = self._open[sequence_id], self._step
        assert step.is_planned, "schedule: no step is planned"
        assert not step.is_written, "schedule: the step is written"
        assert step.row_of(sequence) is None, f"schedule: sequence {sequence_id} has a row"
        wanted = min(sequence.num_lacking, most, step.most_per_sequence)
        num_tokens = sequence.fitting(wanted, step.logits_left)
        if num_tokens < 1 or not prepare(self._tables, sequence, num_tokens):
            return 0
        step.logits_left -= step.add(sequence, num_tokens).num_logits
        return num_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of the planned step."""
        return self._step.num_tokens

    @property
    def num_rows(self) -> int:
        """Rows of the planned step."""
        return len(self._step.rows)

    @property
    def num_logits(self) -> int:
        """Logits rows of the planned step."""
        return self._step.num_logits

    def rows(self) -> list[ScheduledSequence]:
        """The planned step's rows."""
        return self._step.scheduled()

    def copies(self) -> list[tuple[int, int]]:
        """The copies that are due, in the order in which they are made."""
        return self._tables.copies()

    def samples(self) -> tuple["array[int]", "array[int]"]:
        """Sequence ids and logits rows: of the rows that sample, then of their forks."""
        return self._step.samples()

    def drafts(self) -> "array[int]":
        """The draft behind each sample; UNKNOWN_DRAFT - 1 for none."""
        return self._step.drafts()

    def fill_drafts(self, token_ids: Sequence[int]) -> None:
        """The unknown drafts of the step in flight."""
        filled = array("i", token_ids)
        assert self._step.is_written, "fill_drafts: the step is not written"
        self._step.fill_drafts(filled)

    def scores(self) -> list[Score]:
        """The logits rows that are for prompt logprobs, in row order."""
        return self._step.scores()

    def write(self, slot: memoryview, step_id: int) -> None:
        """Fill a step slot; the step is in flight."""
        step = self._step
        assert step.rows, "write: the step has no rows"
        assert not step.is_written, "write: the step is written"
        write_slot(slot, self._layout, step_id, step, self.copies(), self.block_size)
        step.is_written = True

    # ------------------------------------------------------------------ the end of a step

    def apply(self, token_ids: Sequence[int], complete: Sequence[int] = ()) -> Outcome:
        """The step was computed. In this order:

        the sources of copies are let go of; what a sequence with logits that are not finite has
        computed is forgotten, since it may be as broken; rows, then their forks, progress by what
        was theirs, newly full blocks being registered; tokens are taken, each that was drafted
        being progress too, a sequence that ends being closed at once, one that goes on giving back
        the blocks of drafts that it does not need; those that were closed in flight are released.
        """
        step, drawn, ends = self._step, array("i", token_ids), array("i", complete)
        assert step.is_written, "apply: the step is not written"
        taken = taken_tokens(step, drawn, ends)
        self._tables.finish_copies()
        for each in taken:
            if each.is_broken:
                self._tables.forget(each.sequence.table)
                self._open.cease_caching(each.sequence)
        for row in step.rows:
            self._progress(row.sequence, row.num_tokens)
        for rider in step.riders:
            self._progress(rider.sequence, rider.row.num_tokens)
        self._step = PlannedStep()
        self._guesses.clear()
        outcome = Outcome(array("i"), array("q"), array("i"), array("B"), [], [])
        for each in taken:
            self._take(each, outcome)
        self._release_closing()
        return outcome

    def _progress(self, sequence: RunningSequence, num_tokens: int) -> None:
        size, full = self.block_size, self._open.progress(sequence, num_tokens)
        for index in full if sequence.cached else ():
            tokens = sequence.token_ids[index * size : (index + 1) * size]
            parent, digest = sequence.digests[index : index + 2]
            self._tables.cache.register(sequence.table[index], parent, digest, tokens)

    def _take(self, taken: TakenTokens, outcome: Outcome) -> None:
        sequence, last = taken.sequence, len(taken.token_ids) - 1
        for index, token_id in enumerate(taken.token_ids):
            outcome.samples.append(taken.first_sample + index)
            outcome.request_ids.append(sequence.rules.request_id if taken.wanted else -1)
            outcome.token_ids.append(token_id)
            outcome.finishes.append(taken.finish if index == last else FINISH_NONE)
            if taken.wanted and token_id != NOT_FINITE:
                self._open.append(sequence, token_id)
            if index < taken.num_drafted:
                self._progress(sequence, 1)
        if taken.finish != FINISH_NONE:
            outcome.finished.append(sequence.sequence_id)
            outcome.finished_tokens.append(sequence.num_tokens)
            self.close(sequence.sequence_id)
        elif taken.wanted:
            self._tables.cut(sequence.table, sequence.num_tokens)

    def abandon(self) -> None:
        """The step was not computed: no progress, no drafts. Its copies are still due."""
        assert self._step.rows, "abandon: no step is in flight"
        self._guesses.clear()
        self._end_step()

    def _end_step(self) -> None:
        """Without progress; blocks of drafts are given back, then those of who was closed."""
        step, self._step = self._step, PlannedStep()
        for row in step.rows:
            if not row.sequence.closed:
                self._tables.cut(row.sequence.table, row.sequence.num_tokens)
        self._release_closing()

    def _release_closing(self) -> None:
        for sequence in self._closing:
            self._release(sequence)
        self._closing.clear()

    def forget_cache(self) -> None:
        """No block is found by prefix any more, nor what running sequences compute on top."""
        self._tables.cache.clear()
        for sequence in [*self._open, *self._closing]:
            self._open.cease_caching(sequence)

    # ------------------------------------------------------------------ facts

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return self._tables.pool.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self._tables.block_size

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds and no copy is due from, cached ones included."""
        return self._tables.pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be found by prefix, held or free."""
        return len(self._tables.cache)

    @property
    def num_unused_slots(self) -> int:
        """Token slots of held blocks that no token has; a shared last block is counted once, by the
        first in order."""
        unused, seen = 0, set[BlockId]()
        for sequence in self._open:
            if sequence.table[-1] not in seen:
                seen.add(sequence.table[-1])
                unused += max(0, len(sequence.table) * self.block_size - sequence.num_tokens)
        return unused

    def sequence_ids(self) -> list[int]:
        """The open sequences, in order."""
        return [sequence.sequence_id for sequence in self._open]

    def token_ids(self, sequence_id: SequenceId) -> list[int]:
        """The tokens of an open sequence."""
        return self._open[sequence_id].token_ids.tolist()

    def num_computed(self, sequence_id: SequenceId) -> int:
        """How many of them are computed."""
        return self._open[sequence_id].num_computed

    def table(self, sequence_id: SequenceId) -> list[int]:
        """Its blocks in token order."""
        return list(self._open[sequence_id].table)

    def check(self) -> None:
        """Assert every invariant. O(everything): for tests."""
        holders = [*self._open, *self._closing]
        self._open.check()
        self._tables.check(sequence.table for sequence in holders)
        assert self._step.rows or not self._closing, "without a step nothing waits to be released"
        for sequence in holders:
            sequence.check(self.block_size)
        for row in self._step.rows:
            first, last = row.start // self.block_size, (row.end - 1) // self.block_size
            for block in row.sequence.table[first : last + 1]:
                assert block not in self._tables.cache, f"block {block} is cached and written"
