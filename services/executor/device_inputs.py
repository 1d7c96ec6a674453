"""What of a step only a device reads that draws tokens or keeps blocks in host memory.

Numpy views into a slot of the step ring, as in step_inputs.
"""

from dataclasses import dataclass
from math import prod

import numpy as np

from triptych.engine_core.layout import (
    DEVICE_HEADER,
    DEVICE_HEADER_OFFSET,
    MAX_SAMPLE_LOGPROBS,
    PREVIOUS_SAMPLE,
    SAMPLE_COLUMNS,
    STEP_HEADER,
    StepLayout,
)
from triptych.services.executor.step_inputs import Ints, StepInputsError

_LOGPROBS = SAMPLE_COLUMNS.index("logprobs")


@dataclass(frozen=True, slots=True)
class DeviceInputs:
    """One step, cut to its extents; arrays are int32. `StepLayout` has the meanings.

    store_sources, store_targets, load_sources, load_targets; sample_rows [S], sample_params
    [S, len(SAMPLE_COLUMNS)], history_starts [S + 1], history_prompts [S], history; host_logits.
    Without samples `host_logits` is empty too, and every row of logits is for the host.
    `vocabulary_size`: ids at or above are never drawn, nor counted.
    """

    store_sources: Ints
    store_targets: Ints
    load_sources: Ints
    load_targets: Ints
    sample_rows: Ints
    sample_params: Ints
    history_starts: Ints
    history_prompts: Ints
    history: Ints
    host_logits: Ints
    vocabulary_size: int

    @property
    def num_samples(self) -> int:
        """Samples of the step, those that the scheduler draws included; 0 where it draws all."""
        return len(self.sample_rows)

    @property
    def refers_back(self) -> bool:
        """Whether some token of the histories is one that the step before drew."""
        return bool(len(self.history) and self.history.min() <= PREVIOUS_SAMPLE)

    @classmethod
    def view(cls, slot: memoryview, layout: StepLayout) -> "DeviceInputs":
        """Look at a slot without copying. Raises StepInputsError when it contradicts the layout,
        or itself. Contents are checked by `check`."""
        step_id, _, _, num_logits, _ = STEP_HEADER.unpack_from(slot)
        stores, loads, samples, history, host, vocabulary = DEVICE_HEADER.unpack_from(
            slot, DEVICE_HEADER_OFFSET
        )
        if not (
            max(stores, loads) <= layout.max_transfers
            and samples <= layout.max_samples
            and history <= layout.max_history
            and host <= min(num_logits, layout.max_logits)
        ):
            raise StepInputsError(
                f"step {step_id}: {stores} stores, {loads} loads, {samples} samples, {history} "
                f"tokens of history, {host} rows for the host do not fit {layout.max_transfers} "
                f"transfers, {layout.max_samples} samples, {layout.max_history} tokens, "
                f"{num_logits} rows"
            )
        counts = {
            "store_sources": stores,
            "store_targets": stores,
            "load_sources": loads,
            "load_targets": loads,
            "sample_rows": samples,
            "sample_params": samples,
            "history_starts": samples + 1 if samples else 0,
            "history_prompts": samples,
            "history": history,
            "host_logits": host,
        }
        arrays: dict[str, Ints] = {}
        for name, count in counts.items():
            offset, (_, *inner) = layout.arrays[name]
            size = count * prod(inner)
            arrays[name] = np.frombuffer(slot, np.int32, size, offset).reshape(count, *inner)
        inputs = cls(**arrays, vocabulary_size=vocabulary)
        inputs._check_rows(step_id, num_logits)
        return inputs

    def _check_rows(self, step_id: int, num_logits: int) -> None:
        starts, host = self.history_starts, self.host_logits
        if not len(starts) and len(self.history):
            raise StepInputsError(f"step {step_id}: history of no sample")
        if len(starts) and (
            starts[0] != 0
            or starts[-1] != len(self.history)
            or (np.diff(starts) < 0).any()
            or (self.history_prompts < 0).any()
            or (self.history_prompts > np.diff(starts)).any()
        ):
            raise StepInputsError(f"step {step_id}: samples do not divide the history")
        rows = self.sample_rows
        if len(rows) and (rows.min() < -1 or rows.max() >= num_logits):
            raise StepInputsError(f"step {step_id}: a sample of logits that are not in the step")
        wanted = self.sample_params[:, _LOGPROBS]
        if len(wanted) and (wanted.min() < -1 or wanted.max() > MAX_SAMPLE_LOGPROBS):
            raise StepInputsError(
                f"step {step_id}: {wanted.min()} to {wanted.max()} logprobs of a sample, "
                f"{MAX_SAMPLE_LOGPROBS} are the most"
            )
        if len(host) and (host[0] < 0 or host[-1] >= num_logits or (np.diff(host) < 1).any()):
            raise StepInputsError(f"step {step_id}: rows for the host do not ascend, or are none")

    def check(
        self, *, step_id: int, num_blocks: int, num_host_blocks: int, previous_samples: int
    ) -> None:
        """Raise StepInputsError when an id is out of range: it would touch memory that is no one's.

        `previous_samples`: how many the step before had.
        """
        for name, values, bound in (
            ("store_sources", self.store_sources, num_blocks),
            ("store_targets", self.store_targets, num_host_blocks),
            ("load_sources", self.load_sources, num_host_blocks),
            ("load_targets", self.load_targets, num_blocks),
        ):
            if len(values) and (values.min() < 0 or values.max() >= bound):
                raise StepInputsError(f"step {step_id}: {name} are not within 0 and {bound - 1}")
        if len(self.history) and self.history.min() <= PREVIOUS_SAMPLE - previous_samples:
            raise StepInputsError(
                f"step {step_id}: history of sample {PREVIOUS_SAMPLE - self.history.min()}, "
                f"the step before had {previous_samples}"
            )
