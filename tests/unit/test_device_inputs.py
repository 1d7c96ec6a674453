"""DeviceInputs: views without copies, every contradiction refused."""

from dataclasses import fields

import numpy as np
import pytest

from triptych.engine_core.layout import (
    DEVICE_HEADER,
    DEVICE_HEADER_OFFSET,
    MAX_SAMPLE_LOGPROBS,
    PREVIOUS_SAMPLE,
    SAMPLE_COLUMNS,
    STEP_HEADER,
    StepLayout,
)
from triptych.services.executor.device_inputs import DeviceInputs
from triptych.services.executor.step_inputs import StepInputsError

LAYOUT = StepLayout(1, 8, 3, 2, 3, max_samples=4, max_history=6, max_transfers=2)
BOUNDS = {"step_id": 77, "num_blocks": 5, "num_host_blocks": 3, "previous_samples": 2}
LOGPROBS = SAMPLE_COLUMNS.index("logprobs")


class Slot:
    """A valid step of three rows of logits and three samples; each test spoils something."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(LAYOUT.slot_bytes))
        STEP_HEADER.pack_into(self.view, 0, 77, 4, 3, 3, 0)
        self.header()
        self["store_sources"][:2] = [4, 0]
        self["store_targets"][:2] = [2, 0]
        self["load_sources"][:1] = [2]
        self["load_targets"][:1] = [4]
        self["sample_rows"][:3] = [0, -1, 2]
        self["sample_params"][:3, LOGPROBS] = [-1, 0, MAX_SAMPLE_LOGPROBS]
        self["history_starts"][:4] = [0, 2, 2, 5]
        self["history_prompts"][:3] = [2, 0, 1]
        self["history"][:5] = [1, 2, 3, 4, PREVIOUS_SAMPLE - 1]
        self["host_logits"][:2] = [0, 2]

    def header(
        self, stores: int = 2, loads: int = 1, samples: int = 3, history: int = 5, host: int = 2
    ) -> None:
        DEVICE_HEADER.pack_into(
            self.view, DEVICE_HEADER_OFFSET, stores, loads, samples, history, host, 300
        )

    def __getitem__(self, name: str) -> "np.ndarray[tuple[int, ...], np.dtype[np.int32]]":
        offset, shape = LAYOUT.arrays[name]
        return np.frombuffer(self.view, np.int32, int(np.prod(shape)), offset).reshape(shape)

    def read(self) -> DeviceInputs:
        inputs = DeviceInputs.view(self.view, LAYOUT)
        inputs.check(**BOUNDS)
        return inputs


def test_a_view_is_cut_to_the_step_and_shares_memory() -> None:
    slot = Slot()
    inputs = slot.read()
    assert (inputs.num_samples, inputs.vocabulary_size) == (3, 300)
    assert inputs.refers_back
    assert inputs.history.tolist() == [1, 2, 3, 4, -3]
    assert inputs.sample_params.shape == (3, len(SAMPLE_COLUMNS))
    for name in LAYOUT.arrays.keys() & {each.name for each in fields(DeviceInputs)}:
        assert np.shares_memory(getattr(inputs, name), slot[name])


def test_nothing_of_all_that() -> None:
    slot = Slot()
    slot.header(0, 0, 0, 0, 0)
    inputs = slot.read()
    assert (inputs.num_samples, len(inputs.host_logits), inputs.refers_back) == (0, 0, False)
    assert len(inputs.history_starts) == 0


@pytest.mark.parametrize(
    "counts",
    [
        {"stores": 3}, {"loads": 3}, {"samples": 5}, {"history": 7}, {"host": 4},
        {"samples": 2**32 - 1}, {"history": 2**31},
    ],
)  # fmt: skip
def test_impossible_counts(counts: dict[str, int]) -> None:
    slot = Slot()
    slot.header(**counts)
    with pytest.raises(StepInputsError, match=r"step 77: .* do not fit"):
        slot.read()


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("store_sources", 0, 5, "store_sources are not within 0 and 4"),
        ("store_targets", 1, 3, "store_targets are not within 0 and 2"),
        ("load_sources", 0, -1, "load_sources are not within 0 and 2"),
        ("load_targets", 0, 5, "load_targets are not within 0 and 4"),
        ("sample_rows", 0, 3, "a sample of logits that are not in the step"),
        ("sample_rows", 1, -2, "a sample of logits that are not in the step"),
        ("sample_params", (1, LOGPROBS), MAX_SAMPLE_LOGPROBS + 1, "to 21 logprobs of a sample"),
        ("history_starts", 0, 1, "do not divide the history"),
        ("history_starts", 3, 4, "do not divide the history"),
        ("history_starts", 1, 3, "do not divide the history"),
        ("history_prompts", 0, 3, "do not divide the history"),
        ("history_prompts", 1, -1, "do not divide the history"),
        ("history", 4, PREVIOUS_SAMPLE - 2, "history of sample 2, the step before had 2"),
        ("host_logits", 1, 0, "rows for the host do not ascend"),
        ("host_logits", 1, 3, "rows for the host do not ascend, or are none"),
        ("host_logits", 0, -1, "rows for the host do not ascend"),
    ],
)
def test_contradictions(name: str, index: int | tuple[int, int], value: int, message: str) -> None:
    slot = Slot()
    slot.read()
    slot[name][index] = value
    with pytest.raises(StepInputsError, match=message):
        slot.read()


def test_a_history_of_nobody() -> None:
    slot = Slot()
    slot.header(samples=0)
    with pytest.raises(StepInputsError, match="history of no sample"):
        slot.read()
