"""What must be true of a batch, as values: its shape, its sequences, what can be seen of it."""

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from kv_memory import Text
from triptych.engine_core.batch import (
    FINISH_LENGTH,
    FINISH_NONE,
    FINISH_NOT_FINITE,
    FINISH_STOP,
    NOT_FINITE,
    UNKNOWN_DRAFT,
    Batch,
    Score,
    SequenceRules,
)
from triptych.engine_core.ids import SequenceId
from triptych.engine_core.layout import StepLayout
from triptych.engine_core.step import ScheduledSequence


class BatchFactory(Protocol):
    """A batch's class."""

    def __call__(
        self,
        num_blocks: int,
        block_size: int,
        layout: StepLayout,
        prefix_caching: bool = True,
        num_host_blocks: int = 0,
    ) -> Batch: ...


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
    num_host_blocks: int = 0
    max_transfers: int = 0

    @property
    def layout(self) -> StepLayout:
        return StepLayout(
            num_slots=1,
            max_tokens=self.max_tokens,
            max_rows=self.max_rows,
            max_blocks_per_row=-(-self.max_len // self.block_size) + 1,
            max_logits=self.max_tokens,
            max_transfers=self.max_transfers,
        )


def next_token(text: Text) -> int:
    """The fake model: a hash of all it attends to, the mark included."""
    return zlib.crc32(repr(tuple(text)).encode()) % VOCABULARY


def guessed_token(text: Text) -> int:
    """The executor's draft model: as often right as wrong."""
    return (next_token(text) + zlib.crc32(repr(text).encode()) // 64 % 2) % VOCABULARY


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

    @property
    def may_draft(self) -> bool:
        return not self.rules.held and len(self.tokens) > self.rules.num_prompt

    @property
    def most_tokens(self) -> int:
        return min(self.rules.max_len, self.rules.num_prompt + self.rules.max_tokens)

    def guesses(self, length: int, num_right: int, *, unknown: bool) -> list[int]:
        """Of the next `length` tokens; behind the first `num_right` wrong or unknown ones."""
        tokens = list(self.tokens)
        for index in range(length):
            token = next_token(Text(self.mark, tuple(tokens)))
            if index >= num_right:
                token = UNKNOWN_DRAFT if unknown else (token + 1) % VOCABULARY
            tokens.append(token)
        return tokens[len(self.tokens) :]

    def take(self, token: int, *, complete: bool = False) -> int:
        """A drawn token: the finish it means."""
        if token == NOT_FINITE:
            return FINISH_NOT_FINITE
        rules = self.rules
        self.tokens.append(token)
        num_tokens = len(self.tokens)
        if complete or token in rules.stop_token_ids:
            return FINISH_STOP
        if num_tokens - rules.num_prompt >= rules.max_tokens or num_tokens >= rules.max_len:
            return FINISH_LENGTH
        return FINISH_NONE


@dataclass
class PlannedRow:
    """A row, and which of its tokens are drafts: the last ones."""

    expected: Expected
    row: ScheduledSequence
    drafts: list[int]

    @property
    def number(self) -> int:
        return self.row.sequence_id

    @property
    def num_own(self) -> int:
        return self.row.num_tokens - len(self.drafts)

    def text(self, end: int | None = None) -> Text:
        """Of its sequence with the drafts behind."""
        return Text(self.expected.mark, (*self.expected.tokens, *self.drafts)[:end])

    def logits_positions(self) -> list[int]:
        """The positions whose logits are wanted, in order."""
        rules, end, scored = self.expected.rules, self.row.start + self.num_own, list[int]()
        if rules.score_prompt:
            scored = list(range(self.row.start, min(end, rules.num_prompt - 1)))
        last = range(end - 1, end + len(self.drafts)) if self.row.samples else ()
        return [*scored, *last]


def planned_rows(batch: Batch, expected: dict[int, Expected]) -> list[PlannedRow]:
    """The rows of a batch, with their drafts as drafts() has them; unknown ones as such."""
    behind, found = iter(batch.drafts()), []
    for row in batch.rows():
        drafts: list[int] = []
        while row.samples and (draft := next(behind)) >= UNKNOWN_DRAFT:
            drafts.append(draft)
        found.append(PlannedRow(expected[row.sequence_id], row, drafts))
    return found


def check_budgets(
    rows: list[PlannedRow], num_open: int, budget: int, most: int, logits_budget: int
) -> None:
    """Everybody has a token, and the first in order the rest."""
    num_tokens = sum(row.row.num_tokens for row in rows)
    assert num_tokens <= max(budget, len(rows))
    assert all(row.num_own <= most for row in rows)
    assert sum(len(row.logits_positions()) for row in rows) <= max(logits_budget, num_open)
    left = max(0, budget - sum(row.num_own for row in rows))
    for index, row in enumerate(rows):
        wanted = min(row.expected.lacking, most)
        if not row.expected.rules.score_prompt and row.num_own < wanted:
            assert left == 0, "tokens are left though one that lacks some got fewer"
            assert all(r.num_own == 1 for r in islice(rows, index + 1, None)), "first ones first"


def check_drafts(
    rows: list[PlannedRow],
    guesses: dict[int, list[int]],
    tokens_left: int,
    logits_left: int,
    full: Callable[[PlannedRow], bool],
) -> None:
    """They are the first guesses, as many as there is room for beside everybody's own tokens.
    `full`: there is no block for one more behind a row."""
    for row in rows:
        wished = guesses.get(row.number, []) if row.row.samples else []
        room = row.expected.most_tokens - len(row.expected.tokens) - 1
        fitting = max(0, min(len(wished), tokens_left, logits_left, room))
        assert row.drafts == wished[: len(row.drafts)]
        assert len(row.drafts) <= fitting
        assert len(row.drafts) == fitting or full(row), "there was room for more drafts"
        tokens_left -= len(row.drafts)
        logits_left -= len(row.drafts)


def check_scores(rows: list[PlannedRow], scores: list[Score]) -> None:
    """They are those of the rows."""
    found = {score.sequence_id: score for score in scores}
    first = 0
    for row in rows:
        num_logits = len(row.logits_positions())
        num_scored = num_logits - row.row.samples - len(row.drafts)
        score = found.pop(row.row.sequence_id, None)
        assert (score is not None) == (num_scored > 0)
        if score is not None:
            assert score[1:] == (first, row.row.start, num_scored)
        first += num_logits
    assert not found


def expected_pending(
    tokens: Sequence[int], mark: str, computed: int, others: Iterable[Expected], shape: BatchShape
) -> int:
    """Match.pending of a text of which so much is computed."""
    size, most = shape.block_size, len(tokens) - 1
    coming: set[Text] = set()
    for other in others:
        if other.cached:
            first = other.computed // size
            ends = range((first + 1) * size, len(other.tokens) + 1, size)
            coming.update(other.text(end) for end in ends)
    # A partial hit may reach the last token but one of a block that could not be a whole hit.
    end = computed // size
    while (end + 1) * size <= len(tokens):
        if Text(mark, tuple(tokens[: (end + 1) * size])) not in coming:
            break
        end += 1
    return max(0, min(end * size, most) - computed) if shape.prefix_caching else 0


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
        batch.stores(),
        batch.loads(),
        batch.num_host_blocks,
        batch.num_host_blocks_used,
        batch.host_hits_total,
        batch.samples(),
        batch.drafts(),
        batch.scores(),
        batch.rows_ahead(),
        batch.samples_ahead(),
        batch.scores_ahead(),
    )
