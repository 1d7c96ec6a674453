"""What can be seen of a plain batch: the other half of python_batch.py, which changes it."""

from array import array

from triptych.engine_core.batch import Score
from triptych.engine_core.block_tables import BlockTables
from triptych.engine_core.ids import BlockId, SequenceId
from triptych.engine_core.planned_step import PlannedStep
from triptych.engine_core.running import RunningSequence
from triptych.engine_core.running_order import RunningOrder
from triptych.engine_core.step import ScheduledSequence


class BatchFacts:
    """The state, and what batch.Batch tells of it."""

    def __init__(
        self, num_blocks: int, block_size: int, num_host_blocks: int, max_transfers: int
    ) -> None:
        self._tables = BlockTables(num_blocks, block_size, num_host_blocks, max_transfers)
        self._open = RunningOrder(block_size)
        self._step = PlannedStep()
        self._ahead: PlannedStep | None = None

    # ------------------------------------------------------------------ the planned step

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

    def stores(self) -> list[tuple[int, int]]:
        """The stores that the next step makes, in order."""
        transfers = self._tables.transfers
        return [] if transfers is None else transfers.stores()

    def loads(self) -> list[tuple[int, int]]:
        """The loads that it makes behind them, in order."""
        transfers = self._tables.transfers
        return [] if transfers is None else transfers.loads()

    def samples(self) -> tuple["array[int]", "array[int]"]:
        """Sequence ids and logits rows: of the rows that sample, then of their forks."""
        return self._step.samples()

    def drafts(self) -> "array[int]":
        """The draft behind each sample; UNKNOWN_DRAFT - 1 for none."""
        return self._step.drafts()

    def scores(self) -> list[Score]:
        """The logits rows that are for prompt logprobs, in row order."""
        return self._step.scores()

    def rows_ahead(self) -> list[ScheduledSequence]:
        """The rows of the step ahead."""
        return [] if self._ahead is None else self._ahead.scheduled()

    def samples_ahead(self) -> tuple["array[int]", "array[int]", "array[int]"]:
        """Those of the step ahead, and for each the sample before it that draws its last token."""
        step = self._ahead or PlannedStep()
        return *step.samples(), step.previous()

    def scores_ahead(self) -> list[Score]:
        """Those of the step ahead."""
        return [] if self._ahead is None else self._ahead.scores()

    # ------------------------------------------------------------------ all that runs

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
    def num_host_blocks(self) -> int:
        """Blocks of host memory."""
        transfers = self._tables.transfers
        return 0 if transfers is None else transfers.host.num_blocks

    @property
    def num_host_blocks_used(self) -> int:
        """Those whose text can be found."""
        transfers = self._tables.transfers
        return 0 if transfers is None else transfers.host.num_used

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
        holders, step = self._holders(), self._step
        self._open.check()
        self._tables.check(sequence.table for sequence in holders)
        assert step.rows or not step.closing, "without a step nothing waits to be released"
        for sequence in holders:
            sequence.check(self.block_size)
        for row in [*step.rows, *(self._ahead.rows if self._ahead is not None else ())]:
            first, last = row.start // self.block_size, (row.end - 1) // self.block_size
            for block in row.sequence.table[first : last + 1]:
                assert block not in self._tables.cache, f"block {block} is cached and written"

    def _holders(self) -> list[RunningSequence]:
        """All that hold blocks."""
        ahead = self._ahead.closing if self._ahead is not None else []
        return [*self._open, *self._step.closing, *ahead]
