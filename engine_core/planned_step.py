"""The step that is planned or in flight: its rows, and what of them is wanted."""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from triptych.engine_core.batch import UNKNOWN_DRAFT, Score
from triptych.engine_core.running import RunningSequence
from triptych.engine_core.step import ScheduledSequence


class Row(NamedTuple):
    """Compute tokens [start, start + num_tokens) of a sequence, and `drafts` behind them.

    Its logits rows are [logits_row, logits_row + num_logits): of its first `num_scored` tokens,
    and, if it `samples`, of its last one and of each draft. Only a row that samples has drafts.
    `previous`: its token is not known yet, being what that sample of the step before draws; -1 for
    a row whose tokens are known.
    """

    sequence: RunningSequence
    start: int
    num_tokens: int
    num_scored: int
    samples: bool
    first_token: int
    logits_row: int
    drafts: "array[int]"
    previous: int = -1

    @property
    def num_progressing(self) -> int:
        """Its own tokens by which its sequence is further when the step is over. Not those of a
        sequence that ceased to run before the step began: those on top of a step that failed, and a
        token that nobody was told."""
        sequence = self.sequence
        if sequence.num_computed != self.start:
            return 0
        return min(self.num_tokens, sequence.num_tokens - self.start)

    @property
    def num_computed(self) -> int:
        """Tokens that the step computes, drafts included."""
        return self.num_tokens + len(self.drafts)

    @property
    def end(self) -> int:
        """Behind the last draft, in the sequence."""
        return self.start + self.num_computed

    @property
    def num_samples(self) -> int:
        """Tokens to be drawn for it."""
        return self.samples + len(self.drafts)

    @property
    def num_logits(self) -> int:
        """Rows of logits."""
        return self.num_scored + self.num_samples

    @property
    def first_sample_row(self) -> int:
        """The row of logits from which its first token is drawn."""
        return self.logits_row + self.num_scored


class Rider(NamedTuple):
    """A sequence that was forked from a row's while the step was planned: it progresses with the
    row, and samples from its logits if it samples. A row with drafts has none."""

    sequence: RunningSequence
    row: Row


class PlannedStep:
    """Rows in order. Riders and samples keep their places when a sequence is closed.

    With rows it is in flight; `is_planned` is False only for the empty step between two plans.
    `is_ahead`: it was planned while another was in flight. `closing`: sequences to be released when
    it is over, in the order in which they were closed. `copies`, `stores`, `loads`: (source,
    target) as written.
    """

    def __init__(
        self,
        most_per_sequence: int = 0,
        logits_left: int = 0,
        *,
        is_planned: bool = False,
        is_ahead: bool = False,
    ) -> None:
        self.is_planned = is_planned
        self.is_ahead = is_ahead
        self.closing: list[RunningSequence] = []
        self.copies: list[tuple[int, int]] = []
        self.stores: list[tuple[int, int]] = []
        self.loads: list[tuple[int, int]] = []
        self.most_per_sequence = most_per_sequence
        self.logits_left = logits_left
        self.rows: list[Row] = []
        self.riders: list[Rider] = []
        self.num_tokens = 0
        self.num_logits = 0
        self.is_written = False
        self._row_of: dict[RunningSequence, Row] = {}

    def add(
        self,
        sequence: RunningSequence,
        num_tokens: int,
        drafts: Sequence[int] = (),
        passed: int = 0,
        previous: int = -1,
    ) -> Row:
        """A row for the next `num_tokens` tokens of a sequence, behind `passed` that the step in
        flight computes, and `drafts` behind its last. `previous`: see Row; then it is one token."""
        row = Row(
            sequence=sequence,
            start=sequence.num_computed + passed,
            num_tokens=num_tokens,
            num_scored=sequence.num_scored(num_tokens, passed),
            samples=previous >= 0 or num_tokens == sequence.num_lacking - passed,
            first_token=self.num_tokens,
            logits_row=self.num_logits,
            drafts=array("i", drafts),
            previous=previous,
        )
        assert row.samples or not row.drafts, "drafts stand behind a sequence's last token"
        self.rows.append(row)
        self._row_of[sequence] = row
        self.num_tokens += row.num_computed
        self.num_logits += row.num_logits
        return row

    def row_of(self, sequence: RunningSequence) -> Row | None:
        """The row that a sequence has or rides on. Not asked by id: one that was closed keeps its
        row, and its id may be open again."""
        return self._row_of.get(sequence)

    def keeps(self, sequence: RunningSequence) -> bool:
        """Whether what the sequence holds may be in use until the step is over. Without a row it
        may still have a copy; in a step ahead only rows have."""
        return sequence in self._row_of or (bool(self.rows) and not self.is_ahead)

    def check_stands(self) -> None:
        """AssertionError where a row of a step ahead is on top of a step that was abandoned, and
        its sequence still runs."""
        for row in self.rows if self.is_ahead else ():
            stands = row.sequence.closed or row.start == row.sequence.num_computed
            assert stands, f"sequence {row.sequence.sequence_id} stands on an abandoned step"

    def ride(self, sequence: RunningSequence, row: Row) -> None:
        """One sequence more that is as far as the row's when the step is done."""
        self.riders.append(Rider(sequence, row))
        self._row_of[sequence] = row

    def scheduled(self) -> list[ScheduledSequence]:
        """The rows as values."""
        return [
            ScheduledSequence(row.sequence.sequence_id, row.start, row.num_computed, row.samples)
            for row in self.rows
        ]

    def samplers(self) -> list[Rider]:
        """Who samples, with the row: rows in order, then riders as they were forked. Each has the
        row's `num_samples` samples, one behind the other."""
        owners = [Rider(row.sequence, row) for row in self.rows] + self.riders
        return [owner for owner in owners if owner.row.samples]

    def samples(self) -> tuple["array[int]", "array[int]"]:
        """Sequence ids (int64) and logits rows (int32) of the samples."""
        ids, logits_rows = array("q"), array("i")
        for sequence, row in self.samplers():
            ids.extend([sequence.sequence_id] * row.num_samples)
            logits_rows.extend(range(row.first_sample_row, row.first_sample_row + row.num_samples))
        return ids, logits_rows

    def previous(self) -> "array[int]":
        """For each sample of a step ahead the sample of the step before that draws the last token
        of its sequence; -1 where that is known."""
        return array("i", [row.previous for _, row in self.samplers()])

    def drafts(self) -> "array[int]":
        """For each sample the draft behind it; UNKNOWN_DRAFT - 1 for none."""
        drafts = array("i")
        for _, row in self.samplers():
            drafts.extend(row.drafts)
            drafts.append(UNKNOWN_DRAFT - 1)
        return drafts

    def fill_drafts(self, token_ids: "array[int]") -> None:
        """The unknown drafts, in the order of the samples. ValueError unless there are as many,
        and these are tokens."""
        unknown = [
            (row.drafts, index)
            for row in self.rows
            for index, token_id in enumerate(row.drafts)
            if token_id == UNKNOWN_DRAFT
        ]
        if len(token_ids) != len(unknown):
            raise ValueError(f"drafts: {len(token_ids)} token ids, {len(unknown)} are unknown")
        if min(token_ids, default=0) < 0:
            raise ValueError(f"drafts: token id {min(token_ids)} is below 0")
        for (drafts, index), token_id in zip(unknown, token_ids, strict=True):
            drafts[index] = token_id

    def scores(self) -> list[Score]:
        """The logits that are for prompt logprobs."""
        return [
            Score(row.sequence.sequence_id, row.logits_row, row.start, row.num_scored)
            for row in self.rows
            if row.num_scored
        ]
