"""The inputs of a step where they stand: numpy views into a slot of the step ring."""

from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from triptych.engine_core.layout import PREVIOUS_SAMPLE, STEP_HEADER, StepLayout

Ints = npt.NDArray[np.int32]


class StepInputsError(ValueError):
    """The slot's contents contradict themselves, or name what this executor does not have."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step, cut to its tokens T and rows R; arrays are int32. `StepLayout` has the meanings.

    The arrays are views: they hold as long as the slot is leased, and change with it.

    token_ids, positions, slots [T]; row_starts [R + 1]; kv_lengths [R]; logits_tokens [L];
    copy_sources, copy_targets [C]; block_tables [R, max_blocks_per_row]
    """

    step_id: int
    token_ids: Ints
    positions: Ints
    slots: Ints
    row_starts: Ints
    kv_lengths: Ints
    logits_tokens: Ints
    copy_sources: Ints
    copy_targets: Ints
    block_tables: Ints

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return len(self.token_ids)

    @property
    def num_rows(self) -> int:
        """Sequences that take part."""
        return len(self.kv_lengths)

    @property
    def num_logits(self) -> int:
        """Rows of logits to write."""
        return len(self.logits_tokens)

    @property
    def refers_back(self) -> bool:
        """Whether some token is one that the step before drew."""
        return bool(self.token_ids.min() <= PREVIOUS_SAMPLE)

    @classmethod
    def view(cls, slot: memoryview, layout: StepLayout) -> "StepInputs":
        """Look at a slot (`layout.slot_bytes` bytes) without copying.

        Raises StepInputsError when the header or the rows contradict the layout. Contents are
        checked against a model by `check`.
        """
        if slot.nbytes < layout.slot_bytes:
            raise StepInputsError(
                f"slot of {slot.nbytes} bytes, the layout has {layout.slot_bytes}"
            )
        step_id, num_tokens, num_rows, num_logits, num_copies = STEP_HEADER.unpack_from(slot)
        if not (
            1 <= num_rows <= min(layout.max_rows, num_tokens)
            and num_tokens <= layout.max_tokens
            and num_logits <= min(layout.max_logits, num_tokens)
            and num_copies <= layout.max_rows
        ):
            raise StepInputsError(
                f"step {step_id}: {num_tokens} tokens, {num_rows} rows, {num_logits} logits, "
                f"{num_copies} copies do not fit {layout.max_tokens} tokens, {layout.max_rows} "
                f"rows and {layout.max_logits} logits"
            )
        counts = {
            "token_ids": num_tokens,
            "positions": num_tokens,
            "slots": num_tokens,
            "row_starts": num_rows + 1,
            "kv_lengths": num_rows,
            "logits_tokens": num_logits,
            "copy_sources": num_copies,
            "copy_targets": num_copies,
            "block_tables": num_rows,
        }
        arrays: dict[str, Ints] = {}
        for name, count in counts.items():
            offset, (_, *inner) = layout.arrays[name]
            size = count * prod(inner)
            arrays[name] = np.frombuffer(slot, np.int32, size, offset).reshape(count, *inner)
        inputs = cls(step_id=step_id, **arrays)
        inputs._check_rows()
        return inputs

    def _check_rows(self) -> None:
        starts, lengths = self.row_starts, self.kv_lengths
        counts = np.diff(starts)
        if starts[0] != 0 or starts[-1] != self.num_tokens or counts.min() < 1:
            raise StepInputsError(f"step {self.step_id}: rows do not divide the tokens")
        if (lengths < counts).any():
            raise StepInputsError(f"step {self.step_id}: a row has more tokens than its sequence")
        wanted = self.logits_tokens
        if len(wanted) and (wanted[0] < 0 or wanted[-1] >= self.num_tokens):
            raise StepInputsError(f"step {self.step_id}: logits of tokens that are not in the step")
        if (np.diff(wanted) < 1).any():
            raise StepInputsError(f"step {self.step_id}: logits tokens do not ascend")

    def check_room(self, num_rows: int) -> None:
        """Raise StepInputsError unless `num_rows` rows of logits suffice."""
        if self.num_logits > num_rows:
            raise StepInputsError(f"{self.num_logits} rows of logits, there is room for {num_rows}")

    def check(
        self,
        *,
        vocabulary_size: int,
        max_model_len: int,
        num_blocks: int,
        block_size: int,
        previous_samples: int = 0,
    ) -> None:
        """Raise StepInputsError when an id is out of the model's or the cache's range.

        An id out of range would read or overwrite memory that is no one's. `previous_samples`: how
        many the step before had, where its tokens may be referred to; 0 where they may not.
        """
        token_ids = self.token_ids
        if previous_samples:
            referred = (token_ids <= PREVIOUS_SAMPLE) & (
                token_ids > PREVIOUS_SAMPLE - previous_samples
            )
            token_ids = np.where(referred, np.int32(0), token_ids)
        bounds = (
            ("token id", token_ids, vocabulary_size),
            ("position", self.positions, max_model_len),
            ("slot", self.slots, num_blocks * block_size),
        )
        for name, values, bound in bounds:
            if values.min() < 0 or values.max() >= bound:
                worst = values.min() if values.min() < 0 else values.max()
                raise StepInputsError(
                    f"step {self.step_id}: {name} {worst} is not within 0 and {bound - 1}"
                )
        for copied in (self.copy_sources, self.copy_targets):
            if len(copied) and (copied.min() < 0 or copied.max() >= num_blocks):
                raise StepInputsError(
                    f"step {self.step_id}: a copy of blocks that are not within 0 and "
                    f"{num_blocks - 1}"
                )
        if self.kv_lengths.max() > max_model_len:
            raise StepInputsError(
                f"step {self.step_id}: sequence of {self.kv_lengths.max()} tokens, "
                f"at most {max_model_len}"
            )
        used = -(-self.kv_lengths // block_size)
        if used.max() > self.block_tables.shape[1]:
            raise StepInputsError(f"step {self.step_id}: a sequence has more blocks than its table")
        blocks = self.block_tables[:, : used.max()]
        blocks = blocks[np.arange(used.max()) < used[:, None]]
        if blocks.min() < 0 or blocks.max() >= num_blocks:
            worst = blocks.min() if blocks.min() < 0 else blocks.max()
            raise StepInputsError(
                f"step {self.step_id}: block {worst} is not within 0 and {num_blocks - 1}"
            )
