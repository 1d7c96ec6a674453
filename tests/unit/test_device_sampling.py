"""What a step tells a device of its samples: columns, histories, and which are not the device's."""

import math
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.engine_core.batch import Score
from triptych.engine_core.ids import SequenceId
from triptych.engine_core.layout import (
    DEVICE_HEADER,
    DEVICE_HEADER_OFFSET,
    MAX_SAMPLE_LOGPROBS,
    PREVIOUS_SAMPLE,
    SAMPLE_COLUMNS,
    STEP_HEADER,
    StepLayout,
)
from triptych.engine_core.sampling_params import BeamParams, ExternalSampler, SamplingParams
from triptych.services.executor.device_inputs import DeviceInputs
from triptych.services.scheduler.device_sampling import DeviceSampling, StepSamples
from triptych.services.scheduler.running_grammars import LAST

VOCABULARY = 50
LAYOUT = StepLayout(
    num_slots=1, max_tokens=64, max_rows=8, max_blocks_per_row=4, max_logits=12, max_samples=12,
    max_history=40, max_transfers=2,
)  # fmt: skip


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 99, **fields})


def sampling(*opened: tuple[int, SamplingParams], processed: bool = False) -> DeviceSampling:
    """With these sequences, each with prompt (9, 5, 9) and output (7, 8)."""
    device = DeviceSampling(LAYOUT, VOCABULARY, processed_logprobs=processed)
    for sequence_id, each in opened:
        device.open(sequence_id, each, 0, (9, 5, 9), (7, 8))
    return device


def a_slot(num_logits: int, stores: int = 0) -> memoryview:
    """One that the core has written."""
    slot = memoryview(bytearray(LAYOUT.slot_bytes))
    STEP_HEADER.pack_into(slot, 0, 1, num_logits, num_logits, num_logits, 0)
    DEVICE_HEADER.pack_into(slot, DEVICE_HEADER_OFFSET, stores, 0, 0, 0, 0, 0)
    return slot


def samples(
    ids: Sequence[int],
    rows: Sequence[int] | None = None,
    previous: Sequence[int] | None = None,
    drafts: Sequence[int] | None = None,
) -> StepSamples:
    rows = range(len(ids)) if rows is None else rows
    return StepSamples(
        array("q", ids),
        array("i", rows),
        None if previous is None else array("i", previous),
        None if drafts is None else array("i", drafts),
    )


def column(inputs: DeviceInputs, name: str) -> list[int]:
    values: list[int] = inputs.sample_params[:, SAMPLE_COLUMNS.index(name)].tolist()
    return values


def floats(inputs: DeviceInputs, name: str) -> list[float]:
    values: list[float] = inputs.sample_params.view(np.float32)[
        :, SAMPLE_COLUMNS.index(name)
    ].tolist()
    return values


def test_columns() -> None:
    one = params(
        temperature=0.7, top_k=40, top_p=0.9, min_p=0.1, seed=2**64 - 2, logprobs=3,
        repetition_penalty=1.25, presence_penalty=-0.5, frequency_penalty=0.75,
    )  # fmt: skip
    device = sampling((4, one), (7, params(temperature=0.0, top_k=-1, seed=5)))
    device.open(9, params(top_k=2**40), 3, (1,), ())
    slot = a_slot(3, stores=1)
    asked = device.write(slot, samples([4, 7, 9]))
    assert asked is not None
    assert asked.drawn.all()
    assert asked.logprobs.tolist() == [3, -1, -1]
    assert asked.host() == []
    inputs = DeviceInputs.view(slot, LAYOUT)
    assert len(inputs.store_sources) == 1, "what the core has written stays"
    assert inputs.vocabulary_size == VOCABULARY
    assert inputs.sample_rows.tolist() == [0, 1, 2]
    assert floats(inputs, "temperature") == [np.float32(0.7), 0.0, 1.0]
    assert floats(inputs, "top_p") == [np.float32(0.9), 1.0, 1.0]
    assert floats(inputs, "min_p") == [np.float32(0.1), 0.0, 0.0]
    assert floats(inputs, "repetition_penalty") == [1.25, 1.0, 1.0]
    assert floats(inputs, "presence_penalty") == [-0.5, 0.0, 0.0]
    assert floats(inputs, "frequency_penalty") == [0.75, 0.0, 0.0]
    assert column(inputs, "top_k") == [40, -1, 2**31 - 1]
    assert column(inputs, "seed_low") == [-2, 5, 0]
    assert column(inputs, "seed_high") == [-1, 0, 0]
    assert column(inputs, "choice") == [0, 0, 3]
    assert column(inputs, "position") == [2, 2, 0]
    assert column(inputs, "logprobs") == [3, -1, -1]


def test_positions_go_on_and_count_what_is_drawn_meanwhile() -> None:
    device = sampling((1, params()), (2, params()))
    device.append([1, 2, 1], [3, 4, 5])
    slot = a_slot(2)
    device.write(slot, samples([2, 1], previous=[0, -1]))
    inputs = DeviceInputs.view(slot, LAYOUT)
    assert column(inputs, "position") == [4, 4]
    device.write(slot, samples([2, 1]))
    assert column(inputs, "position") == [3, 4]


@pytest.mark.parametrize(
    "fields",
    [
        {"grammar": "{}"},
        {"processors": (("x", ""),)},
        {"logit_bias": ((1, 1.0),)},
        {"allowed_token_ids": (1,)},
        {"bad_words": ((1,),)},
        {"no_repeat_ngram_size": 1},
        {"typical_p": 0.5},
        {"top_n_sigma": 1.0},
        {"beam": BeamParams(width=2)},
        {"external": ExternalSampler(lease=1)},
        {"logprobs": MAX_SAMPLE_LOGPROBS + 1},
        {"repetition_penalty": 0.001},
        {"min_tokens": 3, "stop_token_ids": (4,)},
    ],
    ids=str,
)
def test_what_the_scheduler_draws(fields: dict[str, Any]) -> None:
    device = sampling((1, params()), (2, params(**fields)), (3, params()))
    slot = a_slot(4)
    asked = device.write(slot, samples([1, 2, 3], rows=[0, 2, 3]))
    assert asked is not None
    assert asked.drawn.tolist() == [True, False, True]
    assert (asked.host(), asked.num_drawn) == ([1], 2)
    inputs = DeviceInputs.view(slot, LAYOUT)
    assert inputs.sample_rows.tolist() == [0, -1, 3]
    assert inputs.host_logits.tolist() == [2]
    alone = a_slot(1)
    before = bytes(alone)
    assert device.write(alone, samples([2])) is None
    assert bytes(alone) == before, "a step without the device's samples is as of old"


@pytest.mark.parametrize(
    "fields",
    [
        {"min_tokens": 2, "stop_token_ids": (4,)},
        {"min_tokens": 90},
        {"stop_token_ids": (4,)},
        {"prompt_logprobs": 3},
        {"n": 4},
        {"logprobs": MAX_SAMPLE_LOGPROBS},
        {"repetition_penalty": 100.0},
    ],
    ids=str,
)
def test_what_the_device_draws(fields: dict[str, Any]) -> None:
    device = sampling((1, params(**fields)))
    assert device.write(a_slot(1), samples([1])) is not None


def test_a_sequence_becomes_the_devices_when_it_may_end() -> None:
    device = sampling((1, params(min_tokens=4, stop_token_ids=(4,))))
    assert device.write(a_slot(1), samples([1])) is None
    device.append([1], [6])
    assert device.write(a_slot(1), samples([1])) is None
    assert device.write(a_slot(1), samples([1], previous=[0])) is not None
    device.append([1], [6])
    assert device.write(a_slot(1), samples([1])) is not None


def test_processed_logprobs_are_the_schedulers() -> None:
    device = sampling((1, params(logprobs=0)), (2, params()), processed=True)
    asked = device.write(a_slot(2), samples([1, 2]))
    assert asked is not None
    assert asked.drawn.tolist() == [False, True]


def test_guesses_are_the_schedulers() -> None:
    device = sampling((1, params()), (2, params()), (3, params()))
    drafted = samples([1, 2, 2, 2, 3], drafts=[LAST, 5, 6, LAST, LAST])
    asked = device.write(a_slot(5), drafted)
    assert asked is not None
    assert asked.drawn.tolist() == [True, False, False, False, True]


def test_histories() -> None:
    device = sampling(
        (1, params(repetition_penalty=1.1)),
        (2, params()),
        (3, params(presence_penalty=1.0)),
        (4, params(repetition_penalty=1.1, typical_p=0.5)),
    )
    device.open(5, params(repetition_penalty=2.0), 0, (VOCABULARY, 3, VOCABULARY + 1, 3), ())
    slot = a_slot(5)
    device.write(slot, samples([1, 2, 3, 4, 5], previous=[-1, 3, 2, 1, -1]))
    inputs = DeviceInputs.view(slot, LAYOUT)
    parts = [
        inputs.history[start:end].tolist()
        for start, end in zip(inputs.history_starts[:-1], inputs.history_starts[1:], strict=True)
    ]
    assert parts == [[5, 9, 7, 8], [], [7, 8, PREVIOUS_SAMPLE - 2], [], [3]]
    assert inputs.history_prompts.tolist() == [2, 0, 0, 0, 1]
    device.append([3, 1], [30, 31])
    device.write(slot, samples([1, 3]))
    inputs = DeviceInputs.view(slot, LAYOUT)
    assert inputs.history.tolist() == [5, 9, 7, 8, 31, 7, 8, 30]


def test_a_history_without_room_is_the_schedulers() -> None:
    device = sampling((1, params(presence_penalty=1.0)), (2, params()))
    long = params(frequency_penalty=1.0)
    device.open(3, long, 0, (1,), range(LAYOUT.max_history - 2))
    device.open(4, long, 0, (1,), range(LAYOUT.max_history - 2))
    slot = a_slot(4)
    asked = device.write(slot, samples([3, 4, 1, 2]))
    assert asked is not None
    assert asked.drawn.tolist() == [True, False, True, True]
    inputs = DeviceInputs.view(slot, LAYOUT)
    assert len(inputs.history) == LAYOUT.max_history
    assert inputs.host_logits.tolist() == [1]
    assert device.write(slot, samples([3], previous=[0])) is not None
    device.append([3, 3], [1, 1])
    assert device.write(a_slot(1), samples([3], previous=[0])) is None


def test_more_samples_than_room_are_all_the_schedulers() -> None:
    device = sampling(*((n, params()) for n in range(LAYOUT.max_samples + 1)))
    everybody = list(range(LAYOUT.max_samples + 1))
    assert device.write(a_slot(1), samples(everybody, rows=[0] * len(everybody))) is None
    assert device.write(a_slot(1), samples(everybody[:-1], rows=[0] * 12)) is not None
    assert device.write(a_slot(1), samples([])) is None


def test_rows_that_score_a_prompt_come_too() -> None:
    device = sampling((1, params(prompt_logprobs=1)), (2, params(typical_p=0.5)))
    slot = a_slot(6)
    scores = [Score(SequenceId(1), 0, 0, 3)]
    device.write(slot, samples([1, 2, 1], rows=[3, 5, 3]), scores)
    inputs = DeviceInputs.view(slot, LAYOUT)
    assert inputs.host_logits.tolist() == [0, 1, 2, 5]
    assert inputs.sample_rows.tolist() == [3, -1, 3]


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["open", "append", "close"]))))
def test_rows_are_given_back(calls: list[tuple[int, str]]) -> None:
    """Whatever comes and goes: each open sequence has its own columns."""
    device = DeviceSampling(LAYOUT, VOCABULARY, processed_logprobs=False)
    known: dict[int, tuple[int, int]] = {}  # seed, position
    for seed, (sequence_id, call) in enumerate(calls):
        match call:
            case "open" if sequence_id not in known:
                device.open(sequence_id, params(seed=seed, presence_penalty=1.0), 0, (1,), (2,))
                known[sequence_id] = (seed, 1)
            case "append" if sequence_id in known:
                device.append([sequence_id], [seed % VOCABULARY])
                known[sequence_id] = (known[sequence_id][0], known[sequence_id][1] + 1)
            case "close" if sequence_id in known:
                device.close(sequence_id)
                del known[sequence_id]
    assert len(device) == len(known)
    if not known:
        return
    slot = a_slot(len(known))
    wide = sum(position for _, position in known.values()) > LAYOUT.max_history
    if device.write(slot, samples(list(known))) is not None:
        inputs = DeviceInputs.view(slot, LAYOUT)
        assert column(inputs, "seed_low") == [seed for seed, _ in known.values()]
        assert column(inputs, "position") == [position for _, position in known.values()]
        lengths = np.diff(inputs.history_starts).tolist()
        assert wide or lengths == [position for _, position in known.values()]


def test_more_sequences_than_the_first_rows() -> None:
    device = DeviceSampling(LAYOUT, VOCABULARY, processed_logprobs=False)
    for sequence_id in range(200):
        device.open(sequence_id, params(seed=sequence_id), 0, (1,), ())
    slot = a_slot(3)
    device.write(slot, samples([0, 63, 199]))
    assert column(DeviceInputs.view(slot, LAYOUT), "seed_low") == [0, 63, 199]
    for sequence_id in range(200):
        device.close(sequence_id)
    assert len(device) == 0


def test_a_penalty_that_the_device_takes_makes_no_number_infinite() -> None:
    """So that no token means logits that are not finite, as the scheduler would find."""
    for penalty in (0.01, 100.0):
        for logit in (3e36, -3e36):
            value = np.float32(logit)
            scaled = value / np.float32(penalty) if value > 0 else value * np.float32(penalty)
            assert math.isfinite(scaled)
