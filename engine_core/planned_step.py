"""The step that is planned or in flight: its rows, and what of them is wanted."""

from typing import NamedTuple

from triptych.engine_core.batch import Score
from triptych.engine_core.running import RunningSequence
from triptych.engine_core.step import ScheduledSequence


class Row(NamedTuple):
    """Compute tokens [start, start + num_tokens) of a sequence.

    Its logits rows are [logits_row, logits_row + num_logits): of its first `num_scored` tokens,
    and of its last one if it `samples`.
    """

    sequence: RunningSequence
    start: int
    num_tokens: int
    num_scored: int
    samples: bool
    first_token: int
    logits_row: int

    @property
    def end(self) -> int:
        """Behind the last token, in the sequence."""
        return self.start + self.num_tokens

    @property
    def num_logits(self) -> int:
        """Rows of logits."""
        return self.num_scored + self.samples


class Rider(NamedTuple):
    """A sequence that was forked from a row's while the step was planned: it progresses with the
    row, and samples from its logits if it samples."""

    sequence: RunningSequence
    row: Row


class PlannedStep:
    """Rows in order. Riders and samples keep their places when a sequence is closed.

    With rows it is in flight; `is_planned` is False only for the empty step between two plans.
    """

    def __init__(
        self, most_per_sequence: int = 0, logits_left: int = 0, *, is_planned: bool = False
    ) -> None:
        self.is_planned = is_planned
        self.most_per_sequence = most_per_sequence
        self.logits_left = logits_left
        self.rows: list[Row] = []
        self.riders: list[Rider] = []
        self.num_tokens = 0
        self.num_logits = 0
        self.is_written = False
        self._row_of: dict[RunningSequence, Row] = {}

    def add(self, sequence: RunningSequence, num_tokens: int) -> Row:
        """A row for the next `num_tokens` tokens of a sequence."""
        row = Row(
            sequence=sequence,
            start=sequence.num_computed,
            num_tokens=num_tokens,
            num_scored=sequence.num_scored(num_tokens),
            samples=num_tokens == sequence.num_lacking,
            first_token=self.num_tokens,
            logits_row=self.num_logits,
        )
        self.rows.append(row)
        self._row_of[sequence] = row
        self.num_tokens += num_tokens
        self.num_logits += row.num_logits
        return row

    def row_of(self, sequence: RunningSequence) -> Row | None:
        """The row that a sequence has or rides on. Not asked by id: one that was closed keeps its
        row, and its id may be open again."""
        return self._row_of.get(sequence)

    def ride(self, sequence: RunningSequence, row: Row) -> None:
        """One sequence more that is as far as the row's when the step is done."""
        self.riders.append(Rider(sequence, row))
        self._row_of[sequence] = row

    def scheduled(self) -> list[ScheduledSequence]:
        """The rows as values."""
        return [
            ScheduledSequence(row.sequence.sequence_id, row.start, row.num_tokens, row.samples)
            for row in self.rows
        ]

    def samples(self) -> list[tuple[RunningSequence, int]]:
        """Who samples, from which logits row: rows in order, then riders as they were forked."""
        owners = [Rider(row.sequence, row) for row in self.rows] + self.riders
        return [(owner, row.logits_row + row.num_scored) for owner, row in owners if row.samples]

    def scores(self) -> list[Score]:
        """The logits that are for prompt logprobs."""
        return [
            Score(row.sequence.sequence_id, row.logits_row, row.start, row.num_scored)
            for row in self.rows
            if row.num_scored
        ]
