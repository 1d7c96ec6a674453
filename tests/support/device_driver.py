"""Drives a device that draws tokens as a scheduler would: two slots, samples, blocks to and fro."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from step_driver import DrivenSequence, StepDriver
from triptych.engine_core.layout import (
    DEVICE_HEADER,
    DEVICE_HEADER_OFFSET,
    SAMPLE_COLUMNS,
    STEP_HEADER,
    StepLayout,
)
from triptych.kernels.reference.sampler import Sampler
from triptych.kernels.sampler_params import SamplerParams, TokenLogprobs
from triptych.services.executor.backend import DrawnColumns, LaunchedStep, PipelinedBackend
from triptych.services.executor.device_inputs import DeviceInputs
from triptych.services.executor.step_inputs import StepInputs

Row = tuple[DrivenSequence, Sequence[int]]
Pairs = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Sample:
    """A sample of a step. `row` -1: the host draws it. `history`: prompt and output tokens, for
    penalties; empty where there are none."""

    row: int
    params: SamplerParams
    position: int = 0
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()


class DeviceDriver(StepDriver):
    """StepDriver with what only a device reads."""

    def __init__(
        self, backend: PipelinedBackend, max_tokens: int = 256, max_rows: int = 32
    ) -> None:
        super().__init__(backend, max_tokens, max_rows)
        self.device = backend
        plain = self.layout
        self.layout = StepLayout(
            2, max_tokens, max_rows, plain.max_blocks_per_row, max_rows, 2 * max_rows, 4096, 16
        )
        self._slots = [memoryview(bytearray(self.layout.slot_bytes)) for _ in range(2)]
        self._slot = self._slots[0]
        self._turn = 0

    def write(
        self,
        rows: Sequence[Row],
        samples: Sequence[Sample],
        host_logits: Sequence[int] = (),
        stores: Pairs = (),
        loads: Pairs = (),
        copies: Pairs = (),
    ) -> tuple[StepInputs, DeviceInputs]:
        """Write a step into the slot whose turn it is."""
        self._turn = 1 - self._turn
        self._slot = self._slots[self._turn]
        self.inputs(rows)
        step_id, num_tokens, num_rows, num_logits, _ = STEP_HEADER.unpack_from(self._slot)
        STEP_HEADER.pack_into(self._slot, 0, step_id, num_tokens, num_rows, num_logits, len(copies))
        history = [[*sample.prompt, *sample.output] for sample in samples]
        DEVICE_HEADER.pack_into(
            self._slot, DEVICE_HEADER_OFFSET, len(stores), len(loads), len(samples),
            sum(map(len, history)), len(host_logits), self.backend.facts.vocabulary_size,
        )  # fmt: skip
        columns: dict[str, object] = {
            "copy_sources": [source for source, _ in copies],
            "copy_targets": [target for _, target in copies],
            "store_sources": [source for source, _ in stores],
            "store_targets": [target for _, target in stores],
            "load_sources": [source for source, _ in loads],
            "load_targets": [target for _, target in loads],
            "sample_rows": [sample.row for sample in samples],
            "history_starts": np.cumsum([0, *map(len, history)]),
            "history_prompts": [len(sample.prompt) for sample in samples],
            "history": [token for each in history for token in each],
            "host_logits": list(host_logits),
        }
        for name, values in columns.items():
            array = np.asarray(values, np.int32)
            self._array(name)[: len(array)] = array
        for index, sample in enumerate(samples):
            self._array("sample_params")[index] = sample_columns(sample.params, sample.position)
        return (
            StepInputs.view(self._slot, self.layout),
            DeviceInputs.view(self._slot, self.layout),
        )

    def launch(
        self,
        rows: Sequence[Row],
        samples: Sequence[Sample],
        host_logits: Sequence[int] = (),
        stores: Pairs = (),
        loads: Pairs = (),
        copies: Pairs = (),
    ) -> LaunchedStep:
        """Queue a step."""
        inputs, device = self.write(rows, samples, host_logits, stores, loads, copies)
        return self.device.launch(inputs, device, self.logits)

    def draw(self, rows: Sequence[Row], samples: Sequence[Sample]) -> DrawnColumns:
        """Compute a step and see what it drew; all rows of logits are in `logits`."""
        drawn = self.launch(rows, samples, range(len(rows))).wait()
        assert drawn is not None
        return drawn


def sample_columns(params: SamplerParams, position: int) -> npt.NDArray[np.int32]:
    """A row of sample_params."""
    row = np.zeros(len(SAMPLE_COLUMNS), np.int32)
    for place, name in enumerate(SAMPLE_COLUMNS):
        match name:
            case "seed_low":
                row[place] = np.uint32(params.seed & 0xFFFFFFFF).view(np.int32)
            case "seed_high":
                row[place] = np.uint32(params.seed >> 32).view(np.int32)
            case "position":
                row[place] = position
            case "choice":
                row[place] = np.uint32(params.choice).view(np.int32)
            case "top_k" | "logprobs":
                row[place] = getattr(params, name)
            case _:
                row[place] = np.float32(getattr(params, name)).view(np.int32)
    return row


def reference_draw(
    logits: npt.NDArray[np.float32], sample: Sample
) -> tuple[int, TokenLogprobs | None]:
    """What the numpy sampler draws for a sample from a row of logits.

    Outputs that the sample does not tell are ids that no vocabulary has: only their number counts.
    """
    sampler = Sampler(len(logits))
    unknown = [1 << 30] * (sample.position - len(sample.output))
    sampler.open(0, sample.params, sample.prompt, [*unknown, *sample.output])
    drawn = sampler.draw(logits[None].copy(), [0], [0])
    return int(drawn.token_ids[0]), drawn.logprobs.get(0)
