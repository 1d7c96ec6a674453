"""The inputs of a step where they stand: numpy views into a slot of the step ring."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from triptych.engine_core.layout import STEP_HEADER, StepLayout

Ints = npt.NDArray[np.int32]


class StepInputsError(ValueError):
    """The slot's contents contradict themselves, or name what this executor does not have."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step, cut to its tokens T and rows R; arrays are int32. `StepLayout` has the meanings.

    The arrays are views: they hold as long as the slot is leased, and change with it.

    token_ids, positions, slots [T]; row_starts [R + 1]; kv_lengths, logits_rows [R];
    block_tables [R, max_blocks_per_row]
    """

    step_id: int
    num_samples: int
    token_ids: Ints
    positions: Ints
    slots: Ints
    row_starts: Ints
    kv_lengths: Ints
    logits_rows: Ints
    block_tables: Ints

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return len(self.token_ids)

    @property
    def num_rows(self) -> int:
        """Sequences that take part."""
        return len(self.kv_lengths)

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
        step_id, num_tokens, num_rows, num_samples, _ = STEP_HEADER.unpack_from(slot)
        if not (
            1 <= num_rows <= min(layout.max_rows, num_tokens)
            and num_tokens <= layout.max_tokens
            and num_samples <= num_rows
        ):
            raise StepInputsError(
                f"step {step_id}: {num_tokens} tokens, {num_rows} rows, {num_samples} samples do "
                f"not fit {layout.max_tokens} tokens and {layout.max_rows} rows"
            )
        counts = {
            "token_ids": num_tokens,
            "positions": num_tokens,
            "slots": num_tokens,
            "row_starts": num_rows + 1,
            "kv_lengths": num_rows,
            "logits_rows": num_rows,
            "block_tables": num_rows,
        }
        arrays: dict[str, Ints] = {}
        for name, count in counts.items():
            offset, (_, *inner) = layout.arrays[name]
            size = count * int(np.prod(inner, dtype=np.int64))
            arrays[name] = np.frombuffer(slot, np.int32, size, offset).reshape(count, *inner)
        inputs = cls(step_id=step_id, num_samples=num_samples, **arrays)
        inputs._check_rows()
        return inputs

    def _check_rows(self) -> None:
        starts, lengths = self.row_starts, self.kv_lengths
        counts = np.diff(starts)
        if starts[0] != 0 or starts[-1] != self.num_tokens or counts.min() < 1:
            raise StepInputsError(f"step {self.step_id}: rows do not divide the tokens")
        if (lengths < counts).any():
            raise StepInputsError(f"step {self.step_id}: a row has more tokens than its sequence")
        if int((self.logits_rows >= 0).sum()) != self.num_samples:
            raise StepInputsError(f"step {self.step_id}: logits rows differ from the samples")

    def check_destinations(self, num_rows: int) -> None:
        """Raise StepInputsError unless the rows that sample have different rows of `num_rows`."""
        rows = self.logits_rows[self.logits_rows >= 0]
        if len(rows) and (rows.max() >= num_rows or len(np.unique(rows)) != len(rows)):
            raise StepInputsError(
                f"logits rows {rows.tolist()} are not different rows of {num_rows}"
            )

    def check(
        self, *, vocabulary_size: int, max_model_len: int, num_blocks: int, block_size: int
    ) -> None:
        """Raise StepInputsError when an id is out of the model's or the cache's range.

        An id out of range would read or overwrite memory that is no one's.
        """
        bounds = (
            ("token id", self.token_ids, vocabulary_size),
            ("position", self.positions, max_model_len),
            ("slot", self.slots, num_blocks * block_size),
        )
        for name, values, bound in bounds:
            if values.min() < 0 or values.max() >= bound:
                worst = values.min() if values.min() < 0 else values.max()
                raise StepInputsError(
                    f"step {self.step_id}: {name} {worst} is not within 0 and {bound - 1}"
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
