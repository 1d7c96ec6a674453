"""The running sequences in plain Python: what batch.Batch means, written to be read.

Every order is part of the meaning (the C++ twin keeps to it, call by call): which block is taken
first (block_tables.py), what is found (prefix_cache.py), who samples when (planned_step.py), which
drawn tokens count (taken_tokens.py), and what is given back in which order (`apply` below).
"""

from array import array
from collections.abc import Collection, Sequence

from triptych.engine_core.batch import (
    FINISH_NONE,
    NOT_FINITE,
    Extent,
    Match,
    Outcome,
    SequenceRules,
)
from triptych.engine_core.batch_facts import BatchFacts
from triptych.engine_core.block_tables import NOTHING_FOUND
from triptych.engine_core.ids import SequenceId
from triptych.engine_core.layout import StepLayout
from triptych.engine_core.planned_step import PlannedStep
from triptych.engine_core.planning import plan_step, prepare
from triptych.engine_core.planning_ahead import plan_step_ahead
from triptych.engine_core.prefix_cache import chain_digests, root_digest, split_digests
from triptych.engine_core.running import RunningSequence
from triptych.engine_core.slot_writer import write_slot
from triptych.engine_core.taken_tokens import TakenTokens, taken_tokens


class PythonBatch(BatchFacts):
    """Fits batch.Batch.

    A planned step with rows is in flight, and with it perhaps the one `_ahead`. Sequences that were
    closed in flight are no longer in `_open`, but in a step's `closing`, with their blocks.
    `_guesses`: those that the next plan, which may be tried again, fits in.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        layout: StepLayout,
        prefix_caching: bool = True,
        num_host_blocks: int = 0,
    ) -> None:
        super().__init__(num_blocks, block_size, num_host_blocks, layout.max_transfers)
        self._layout = layout
        self._prefix_caching = prefix_caching
        self._guesses: dict[SequenceId, array[int]] = {}
        self.prefix_queries_total = 0
        self.prefix_hits_total = 0
        self.host_hits_total = 0

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
        hit = self._tables.lookup(token_ids, chain)
        computed = hit.num_whole * self.block_size + hit.num_copied
        end = hit.num_whole + self._open.num_pending(chain[hit.num_whole + 1 :])
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
        hit = self._tables.lookup(token_ids, chain) if looked_up else NOTHING_FOUND
        sequence = RunningSequence(sequence_id, token_ids, rules, [], 0, chain)
        table = self._tables.open(len(token_ids), hit, spare_blocks)
        if table is None and hit.source is not None:
            hit = hit.without_copy()
            table = self._tables.open(len(token_ids), hit, spare_blocks)
        if table is None:
            return -1
        sequence.table = table
        sequence.num_computed = hit.num_whole * self.block_size + hit.num_copied
        self.host_hits_total += len(hit.loads) * self.block_size
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
        ahead = self._ahead is not None or self._step.is_ahead
        assert not ahead, "fork: a step in flight was planned ahead"
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
        """Cease to run; what is held is given back now, or when the last step in flight is over
        that may use it."""
        sequence = self._open.leave(sequence_id)
        self._guesses.pop(sequence_id, None)
        if self._ahead is not None and self._ahead.keeps(sequence):
            self._ahead.closing.append(sequence)
        elif self._step.keeps(sequence):
            self._step.closing.append(sequence)
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

    def plan_ahead(
        self,
        host_drawn: Collection[int],
        budget: int,
        most_per_sequence: int,
        logits_budget: int,
    ) -> Extent:
        """Rows behind those of the written step in flight; no step where none get any."""
        assert self._step.is_written, "plan_ahead: no written step is in flight"
        assert self._ahead is None, "plan_ahead: two steps are in flight"
        self._step.check_stands()
        assert most_per_sequence >= 1, f"most_per_sequence: {most_per_sequence} is below 1"
        budgets = budget, most_per_sequence, logits_budget
        self._ahead = plan_step_ahead(self._open, self._step, self._tables, host_drawn, budgets)
        if self._ahead is None:
            return Extent(0, 0, 0)
        return Extent(len(self._ahead.rows), self._ahead.num_tokens, self._ahead.num_logits)

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

    def fill_drafts(self, token_ids: Sequence[int]) -> None:
        """The unknown drafts of the step in flight."""
        filled = array("i", token_ids)
        assert self._step.is_written, "fill_drafts: the step is not written"
        self._step.fill_drafts(filled)

    def write(self, slot: memoryview, step_id: int) -> None:
        """Fill a step slot; the step is in flight."""
        step = self._ahead or self._step
        assert step.rows, "write: the step has no rows"
        assert not step.is_written, "write: the step is written"
        sent = self._step.copies if self._ahead is not None else []
        step.copies = [each for each in self.copies() if each not in sent]
        step.stores, step.loads = self.stores(), self.loads()
        write_slot(slot, self._layout, step_id, step, self.block_size)
        if self._tables.transfers is not None:
            self._tables.transfers.send(len(step.stores), len(step.loads))
        step.is_written = True

    # ------------------------------------------------------------------ the end of a step

    def apply(self, token_ids: Sequence[int], complete: Sequence[int] = ()) -> Outcome:
        """The step was computed. In this order:

        stores and loads are over, then the sources of copies are let go of; what a sequence with
        logits that are not finite has computed is forgotten, since it may be as broken; rows, then
        their forks, progress by what was theirs, newly full blocks being registered; tokens are
        taken, each that was drafted being progress too, a sequence that ends being closed at once,
        one that goes on giving back the blocks of drafts that it does not need; those that were
        closed in flight are released.
        """
        step, drawn, ends = self._step, array("i", token_ids), array("i", complete)
        assert step.is_written, "apply: the step is not written"
        assert self._ahead is None or self._ahead.is_written, "apply: the one ahead is not written"
        step.check_stands()
        taken = taken_tokens(step, drawn, ends)
        if self._tables.transfers is not None:
            self._tables.transfers.finish(len(step.stores), len(step.loads))
        self._tables.finish_copies(step.copies)
        for each in taken:
            if each.is_broken:
                self._tables.forget(
                    each.sequence.table, each.sequence.whole_blocks(self.block_size)
                )
                self._open.cease_caching(each.sequence)
        for row in step.rows:
            self._progress(row.sequence, row.num_progressing)
        for rider in step.riders:
            self._progress(rider.sequence, rider.row.num_tokens)
        self._next_step()
        self._guesses.clear()
        outcome = Outcome(array("i"), array("q"), array("i"), array("B"), [], [])
        for each in taken:
            self._take(each, outcome)
        self._release_closing(step)
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
        """The step was not computed: no progress, no drafts. Its copies and loads are still due,
        what it was to store is not found.

        What a step ahead may have copied of it is no text that anybody may find.
        """
        assert self._step.rows, "abandon: no step is in flight"
        self._guesses.clear()
        if self._ahead is not None:
            owners = [row.sequence for row in self._step.rows]
            for sequence in [*owners, *(rider.sequence for rider in self._step.riders)]:
                self._open.cease_caching(sequence)
        self._end_step()

    def _end_step(self) -> None:
        """Without progress; blocks of drafts are given back, then those of who was closed."""
        step = self._step
        if step.is_written and self._tables.transfers is not None:
            self._tables.transfers.abandon(len(step.stores), len(step.loads))
        self._next_step()
        for row in step.rows:
            if not row.sequence.closed and not self._step.keeps(row.sequence):
                self._tables.cut(row.sequence.table, row.sequence.num_tokens)
        self._release_closing(step)

    def _next_step(self) -> None:
        self._step, self._ahead = self._ahead or PlannedStep(), None

    def _release_closing(self, step: PlannedStep) -> None:
        for sequence in step.closing:
            self._release(sequence)

    def forget_cache(self) -> None:
        """No block is found by prefix any more, nor what running sequences compute on top."""
        self._tables.forget_all()
        for sequence in self._holders():
            self._open.cease_caching(sequence)
