"""StepInputs: views without copies, every contradiction refused."""

from dataclasses import fields

import numpy as np
import pytest

from triptych.engine_core.layout import STEP_HEADER, StepLayout
from triptych.services.executor.step_inputs import StepInputs, StepInputsError

LAYOUT = StepLayout(1, 8, 3, 2, 3)
BOUNDS = {"vocabulary_size": 10, "max_model_len": 8, "num_blocks": 5, "block_size": 4}


class Slot:
    """A valid step of two rows, three tokens and one; each test spoils something."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(LAYOUT.slot_bytes))
        self.header()
        self["token_ids"][:4] = [1, 2, 3, 9]
        self["positions"][:4] = [0, 1, 2, 6]
        self["slots"][:4] = [8, 9, 10, 18]
        self["row_starts"][:3] = [0, 3, 4]
        self["kv_lengths"][:2] = [3, 7]
        self["logits_tokens"][:1] = [3]
        self["copy_sources"][:1] = [0]
        self["copy_targets"][:1] = [4]
        self["block_tables"][:2] = [[2, -1], [1, 4]]

    def header(self, tokens: int = 4, rows: int = 2, logits: int = 1, copies: int = 1) -> None:
        STEP_HEADER.pack_into(self.view, 0, 77, tokens, rows, logits, copies)

    def __getitem__(self, name: str) -> "np.ndarray[tuple[int, ...], np.dtype[np.int32]]":
        offset, shape = LAYOUT.arrays[name]
        return np.frombuffer(self.view, np.int32, int(np.prod(shape)), offset).reshape(shape)

    def read(self) -> StepInputs:
        inputs = StepInputs.view(self.view, LAYOUT)
        inputs.check(**BOUNDS)
        return inputs


def test_a_view_is_cut_to_the_step_and_shares_memory() -> None:
    slot = Slot()
    inputs = slot.read()
    assert (inputs.step_id, inputs.num_tokens, inputs.num_rows, inputs.num_logits) == (77, 4, 2, 1)
    assert (inputs.copy_sources.tolist(), inputs.copy_targets.tolist()) == ([0], [4])
    assert inputs.token_ids.tolist() == [1, 2, 3, 9]
    assert inputs.block_tables.tolist() == [[2, -1], [1, 4]]
    slot["token_ids"][0] = 5
    assert inputs.token_ids[0] == 5
    for name in LAYOUT.arrays.keys() & {each.name for each in fields(StepInputs)}:
        assert np.shares_memory(getattr(inputs, name), slot[name])


@pytest.mark.parametrize(
    "counts",
    [
        (0, 0, 0), (0, 1, 0), (9, 2, 1), (4, 4, 1), (4, 2, 4), (1, 2, 1), (2**32 - 1, 2, 1),
        (4, 2, 1, 4), (2, 2, 3), (4, 2, 2**32 - 1),
    ],
)  # fmt: skip
def test_impossible_counts(counts: tuple[int, ...]) -> None:
    slot = Slot()
    slot.header(*counts)
    with pytest.raises(StepInputsError, match="do not fit"):
        slot.read()


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("row_starts", 0, 1, "do not divide"),
        ("row_starts", 1, 4, "do not divide"),
        ("row_starts", 2, 3, "do not divide"),
        ("kv_lengths", 0, 2, "more tokens than its sequence"),
        ("logits_tokens", 0, 4, "logits of tokens that are not in the step"),
        ("logits_tokens", 0, -1, "logits of tokens that are not in the step"),
        ("copy_sources", 0, -1, "a copy of blocks that are not within 0 and 4"),
        ("copy_targets", 0, 5, "a copy of blocks that are not within 0 and 4"),
        ("token_ids", 0, 10, "token id 10 is not within 0 and 9"),
        ("token_ids", 3, -1, "token id -1"),
        ("positions", 1, 8, "position 8"),
        ("slots", 1, 20, "slot 20 is not within 0 and 19"),
        ("slots", 1, -1, "slot -1"),
        ("kv_lengths", 1, 9, "sequence of 9 tokens, at most 8"),
    ],
)
def test_contradictions(name: str, index: int, value: int, message: str) -> None:
    slot = Slot()
    slot[name][index] = value
    with pytest.raises(StepInputsError, match=message):
        slot.read()


def test_blocks_out_of_range() -> None:
    for value in (-1, 5):
        slot = Slot()
        slot["block_tables"][1, 1] = value
        with pytest.raises(StepInputsError, match=f"block {value} is not within 0 and 4"):
            slot.read()


def test_a_short_slot() -> None:
    with pytest.raises(StepInputsError, match="bytes"):
        StepInputs.view(Slot().view[: LAYOUT.slot_bytes - 1], LAYOUT)


@pytest.mark.parametrize(
    ("token", "samples", "allowed"),
    [(-2, 0, False), (-2, 1, True), (-4, 3, True), (-5, 3, False), (-1, 3, False), (10, 3, False)],
)
def test_tokens_that_the_step_before_drew(token: int, samples: int, allowed: bool) -> None:
    slot = Slot()
    slot["token_ids"][1] = token
    inputs = StepInputs.view(slot.view, LAYOUT)
    assert inputs.refers_back == (token <= -2)
    if allowed:
        inputs.check(**BOUNDS, previous_samples=samples)
    else:
        with pytest.raises(StepInputsError, match=f"token id {token} is not within 0 and 9"):
            inputs.check(**BOUNDS, previous_samples=samples)
