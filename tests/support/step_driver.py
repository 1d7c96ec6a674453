"""Drives a Backend as a scheduler would, with its own block tables: rows in, logits out."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from triptych.engine_core.layout import STEP_HEADER, StepLayout
from triptych.services.executor.backend import Backend
from triptych.services.executor.step_inputs import StepInputs

Floats = npt.NDArray[np.float32]


@dataclass
class DrivenSequence:
    """Tokens whose keys and values are in the cache, and the blocks that hold them."""

    computed: int = 0
    blocks: list[int] = field(default_factory=list)


class StepDriver:
    """Gives out blocks in a shuffled order, so that a wrong block table shows."""

    def __init__(self, backend: Backend, max_tokens: int = 256, max_rows: int = 32) -> None:
        facts = backend.facts
        self.backend = backend
        width = -(-facts.max_model_len // facts.block_size)
        self.layout = StepLayout(1, max_tokens, max_rows, width, max_rows)
        self._slot = memoryview(bytearray(self.layout.slot_bytes))
        order = np.random.default_rng(0).permutation(facts.num_blocks)
        self.free: list[int] = [int(block) for block in order]
        self.logits: Floats = np.full((max_rows, facts.vocabulary_size), 7.0, dtype=np.float32)

    @property
    def slot(self) -> memoryview:
        """The bytes of the step that `inputs` wrote last."""
        return self._slot

    def step(self, rows: Sequence[tuple[DrivenSequence, Sequence[int]]]) -> Floats:
        """Compute the next tokens of each sequence; logits [rows, vocabulary] of the last ones."""
        self.backend.execute(self.inputs(rows), self.logits)
        return self.logits[: len(rows)].copy()

    def run(self, tokens: Sequence[int]) -> Floats:
        """Logits behind `tokens`, as a new sequence in one chunk."""
        out: Floats = self.step([(DrivenSequence(), tokens)])[0]
        return out

    def release(self, sequence: DrivenSequence) -> None:
        """Give the blocks back; the next sequence gets them, stale contents and all."""
        self.free = sequence.blocks + self.free
        sequence.blocks, sequence.computed = [], 0

    def inputs(self, rows: Sequence[tuple[DrivenSequence, Sequence[int]]]) -> StepInputs:
        """Write a step into the slot, all rows sampling, and advance the sequences."""
        block_size = self.backend.facts.block_size
        total = sum(len(tokens) for _, tokens in rows)
        STEP_HEADER.pack_into(self._slot, 0, 1, total, len(rows), len(rows), 0)
        at = 0
        self._array("row_starts")[0] = 0
        for row, (sequence, tokens) in enumerate(rows):
            end = sequence.computed + len(tokens)
            while len(sequence.blocks) * block_size < end:
                sequence.blocks.append(self.free.pop(0))
            positions = np.arange(sequence.computed, end)
            blocks = np.array(sequence.blocks)
            span = slice(at, at + len(tokens))
            self._array("token_ids")[span] = tokens
            self._array("positions")[span] = positions
            self._array("slots")[span] = (
                blocks[positions // block_size] * block_size + positions % block_size
            )
            at += len(tokens)
            self._array("row_starts")[row + 1] = at
            self._array("kv_lengths")[row] = end
            self._array("logits_tokens")[row] = at - 1
            tables = self._array("block_tables")
            tables[row] = -1
            tables[row, : len(blocks)] = blocks
            sequence.computed = end
        return StepInputs.view(self._slot, self.layout)

    def _array(self, name: str) -> npt.NDArray[np.int32]:
        offset, shape = self.layout.arrays[name]
        count = int(np.prod(shape))
        return np.frombuffer(self._slot, np.int32, count, offset).reshape(shape)
