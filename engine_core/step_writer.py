"""Writes a step's inputs into a slot of the step ring, in the layout of layout.StepLayout.

The writer keeps a copy of each running sequence's tokens, so that a step is one call whose
arguments are the plan's rows. `kernels/core` has the writer in C++ as well.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import Protocol

from triptych.engine_core.ids import SequenceId
from triptych.engine_core.kv_cache import KvBlocks
from triptych.engine_core.layout import STEP_HEADER, StepLayout
from triptych.engine_core.step import ScheduledSequence


class StepWriter(Protocol):
    """What the scheduler needs of a writer. A sequence is open while it runs."""

    def open(self, sequence_id: SequenceId, token_ids: Sequence[int]) -> None:
        """Copy the tokens that a sequence has when it starts to run."""
        ...

    def append(self, sequence_ids: Sequence[SequenceId], token_ids: Sequence[int]) -> None:
        """One more token for each of the sequences, all of them open."""
        ...

    def close(self, sequence_id: SequenceId) -> None:
        """Forget an open sequence."""
        ...

    def token_ids(self, sequence_id: SequenceId) -> list[int]:
        """The tokens of an open sequence."""
        ...

    def sequence_ids(self) -> list[int]:
        """The open sequences, ascending."""
        ...

    def write(self, slot: memoryview, step_id: int, rows: Sequence[ScheduledSequence]) -> None:
        """Fill `slot`, at least layout.slot_bytes of writable bytes, with the inputs of a step.

        Entries beyond the step's tokens and rows keep what they had. Raises ValueError, with
        nothing written, when the rows exceed the layout, a sequence's tokens or its blocks.
        """
        ...


class PythonStepWriter:
    """The tokens of the running sequences, and where each part of a step goes in a slot."""

    def __init__(self, kv_cache: KvBlocks, layout: StepLayout) -> None:
        self._kv_cache = kv_cache
        self._layout = layout
        self._tokens: dict[SequenceId, array[int]] = {}

    def open(self, sequence_id: SequenceId, token_ids: Sequence[int]) -> None:
        """Copy the tokens of a sequence that starts to run."""
        assert sequence_id not in self._tokens, f"writer: sequence {sequence_id} is open"
        self._tokens[sequence_id] = array("i", token_ids)

    def append(self, sequence_ids: Sequence[SequenceId], token_ids: Sequence[int]) -> None:
        """One more token for each of the sequences."""
        if len(sequence_ids) != len(token_ids):
            raise ValueError("token_ids: not one for each sequence")
        for sequence_id, token_id in zip(sequence_ids, token_ids, strict=True):
            self._tokens[sequence_id].append(token_id)

    def close(self, sequence_id: SequenceId) -> None:
        """Forget an open sequence."""
        del self._tokens[sequence_id]

    def token_ids(self, sequence_id: SequenceId) -> list[int]:
        """The tokens of an open sequence."""
        return self._tokens[sequence_id].tolist()

    def sequence_ids(self) -> list[int]:
        """The open sequences, ascending."""
        return sorted(self._tokens)

    def write(self, slot: memoryview, step_id: int, rows: Sequence[ScheduledSequence]) -> None:
        """Fill the slot, column by column."""
        layout, size = self._layout, self._kv_cache.block_size
        if slot.nbytes < layout.slot_bytes:
            raise ValueError(f"slot: {slot.nbytes} bytes, the layout has {layout.slot_bytes}")
        self._check(rows)
        tokens, positions, slots = array("i"), array("i"), array("i")
        row_starts, kv_lengths, logits_rows = array("i", [0]), array("i"), array("i")
        tables, num_samples = array("i"), 0
        for sequence_id, start, num_tokens, samples in rows:
            end = start + num_tokens
            table = self._kv_cache.table(sequence_id)
            tokens += self._tokens[sequence_id][start:end]
            positions.extend(range(start, end))
            slots.extend(table[t // size] * size + t % size for t in range(start, end))
            row_starts.append(len(tokens))
            kv_lengths.append(end)
            logits_rows.append(num_samples if samples else -1)
            num_samples += samples
            tables.extend(table)
            tables.extend([-1] * (layout.max_blocks_per_row - len(table)))
        STEP_HEADER.pack_into(slot, 0, step_id, len(tokens), len(rows), num_samples, 0)
        columns = (tokens, positions, slots, row_starts, kv_lengths, logits_rows, tables)
        self._copy(slot, zip(layout.arrays.values(), columns, strict=True))

    def _copy(
        self,
        slot: memoryview,
        columns: Iterable[tuple[tuple[int, tuple[int, ...]], "array[int]"]],
    ) -> None:
        for (offset, _), column in columns:
            with slot[offset : offset + 4 * len(column)].cast("i") as target:
                target[:] = memoryview(column)

    def _check(self, rows: Sequence[ScheduledSequence]) -> None:
        layout, num_tokens = self._layout, sum(row.num_tokens for row in rows)
        if len(rows) > layout.max_rows or num_tokens > layout.max_tokens:
            raise ValueError(
                f"rows: {len(rows)} rows of {num_tokens} tokens, the layout has"
                f" {layout.max_rows} of {layout.max_tokens}"
            )
        for row in rows:
            end, known = row.start + row.num_tokens, len(self._tokens[row.sequence_id])
            if row.start < 0 or row.num_tokens < 1 or end > known:
                raise ValueError(
                    f"rows: tokens {row.start} to {end} of sequence {row.sequence_id},"
                    f" which has {known}"
                )
            held = len(self._kv_cache.table(row.sequence_id))
            if held > layout.max_blocks_per_row or held * self._kv_cache.block_size < end:
                raise ValueError(
                    f"rows: {held} blocks of sequence {row.sequence_id} for {end} tokens,"
                    f" the layout has {layout.max_blocks_per_row}"
                )
