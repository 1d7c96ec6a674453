"""What must be true of a batch, as values: its shape, its sequences, what can be seen of it."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass

from kv_memory import Text
from triptych.engine_core.batch import (
    FINISH_LENGTH,
    FINISH_NONE,
    FINISH_NOT_FINITE,
    FINISH_STOP,
    NOT_FINITE,
    Batch,
    SequenceRules,
)
from triptych.engine_core.ids import SequenceId
from triptych.engine_core.layout import StepLayout
from triptych.engine_core.step import ScheduledSequence

BatchFactory = Callable[[int, int, StepLayout, bool], Batch]
VOCABULARY = 3


@dataclass(frozen=True)
class BatchShape:
    """A small batch; its layout has room for `max_rows` rows."""

    num_blocks: int = 8
    block_size: int = 2
    max_len: int = 12
    max_rows: int = 24
    max_tokens: int = 400
    prefix_caching: bool = True

    @property
    def layout(self) -> StepLayout:
        return StepLayout(
            num_slots=1,
            max_tokens=self.max_tokens,
            max_rows=self.max_rows,
            max_blocks_per_row=-(-self.max_len // self.block_size) + 1,
            max_logits=self.max_tokens,
        )


def next_token(text: Text) -> int:
    """The fake model: a hash of all it attends to, the mark included."""
    return zlib.crc32(repr(tuple(text)).encode()) % VOCABULARY


@dataclass
class Expected:
    """What must be true of one open sequence."""

    mark: str
    tokens: list[int]
    rules: SequenceRules
    computed: int
    cached: bool

    def text(self, end: int | None = None) -> Text:
        return Text(self.mark, tuple(self.tokens[:end]))

    @property
    def lacking(self) -> int:
        return len(self.tokens) - self.computed

    def logits_positions(self, row: ScheduledSequence) -> list[int]:
        """The positions of a row of this sequence whose logits are wanted, in order."""
        end, scored = row.start + row.num_tokens, list[int]()
        if self.rules.score_prompt:
            scored = list(range(row.start, min(end, self.rules.num_prompt - 1)))
        return scored + ([end - 1] if row.samples else [])

    def take(self, token: int) -> int:
        """A drawn token: the finish it means."""
        if token == NOT_FINITE:
            return FINISH_NOT_FINITE
        rules = self.rules
        self.tokens.append(token)
        num_tokens = len(self.tokens)
        if token in rules.stop_token_ids:
            return FINISH_STOP
        if num_tokens - rules.num_prompt >= rules.max_tokens or num_tokens >= rules.max_len:
            return FINISH_LENGTH
        return FINISH_NONE


def facts(batch: Batch) -> tuple[object, ...]:
    """Everything that can be seen from outside."""
    ids = batch.sequence_ids()
    keys = [SequenceId(number) for number in ids]
    return (
        ids,
        [batch.token_ids(key) for key in keys],
        [batch.num_computed(key) for key in keys],
        [batch.table(key) for key in keys],
        batch.num_free_blocks,
        batch.num_cached_blocks,
        batch.num_unused_slots,
        batch.prefix_queries_total,
        batch.prefix_hits_total,
        batch.num_tokens,
        batch.num_rows,
        batch.num_logits,
        batch.rows(),
        batch.copies(),
        batch.samples(),
        batch.scores(),
    )
