"""Step inputs made by hand, as the scheduler would write them, ready before a clock runs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from triptych.services.executor.step_inputs import StepInputs


@dataclass(frozen=True, slots=True)
class Row:
    """Compute `tokens` of a sequence (an index) from position `start`."""

    sequence: int
    start: int
    tokens: Sequence[int]
    samples: bool = True


class CraftedSteps:
    """Sequence i owns blocks [i * width, (i + 1) * width): room for `length` tokens each."""

    def __init__(self, length: int, block_size: int) -> None:
        self._block_size = block_size
        self._width = -(-length // block_size)
        self._next_id = 0

    def blocks(self, sequences: int) -> int:
        """Blocks that so many sequences own."""
        return sequences * self._width

    def step(self, rows: Sequence[Row]) -> StepInputs:
        """One step; the k-th row that samples gets row k of the logits."""
        self._next_id += 1
        counts = [len(row.tokens) for row in rows]
        positions = [np.arange(row.start, row.start + len(row.tokens)) for row in rows]
        firsts = [row.sequence * self._width for row in rows]
        slots = [
            first * self._block_size + each for first, each in zip(firsts, positions, strict=True)
        ]
        samples = np.array([row.samples for row in rows])
        return StepInputs(
            step_id=self._next_id,
            token_ids=np.concatenate([np.asarray(row.tokens, np.int32) for row in rows]),
            positions=np.concatenate(positions).astype(np.int32),
            slots=np.concatenate(slots).astype(np.int32),
            row_starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            kv_lengths=np.array(
                [row.start + count for row, count in zip(rows, counts, strict=True)], np.int32
            ),
            logits_tokens=(np.cumsum(counts) - 1)[samples].astype(np.int32),
            copy_sources=np.zeros(0, np.int32),
            copy_targets=np.zeros(0, np.int32),
            block_tables=(np.array(firsts)[:, None] + np.arange(self._width)).astype(np.int32),
        )
