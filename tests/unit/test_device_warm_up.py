"""Steps that are run before anybody waits: every size that kernels tell apart, and in range."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from step_driver import StepDriver
from tiny_models import save, tiny_model
from triptych.services.executor.backend import BackendOptions
from triptych.services.executor.collectives import ALONE
from triptych.services.executor.device.backend import DeviceBackend
from triptych.services.executor.device.capacity import StepCapacity
from triptych.services.executor.device.emulated_device import EmulatedDevice
from triptych.services.executor.device.loading import load_device_model
from triptych.services.executor.device.warm_up import WARM_TOKENS, warm_steps
from triptych.services.executor.step_inputs import StepInputs
from triptych.services.runtime.model_files import resolve_model

BLOCK_SIZE, MAX_MODEL_LEN = 16, 4096


def steps_of(*, tokens: int, rows: int, num_blocks: int = 256) -> list[StepInputs]:
    capacity = StepCapacity.usual(tokens=tokens, rows=rows, blocks=MAX_MODEL_LEN // BLOCK_SIZE)
    found = []
    for inputs, device in warm_steps(capacity, MAX_MODEL_LEN, BLOCK_SIZE, num_blocks):
        assert capacity.holding(inputs, device) == capacity, "a step that does not fit"
        replace(inputs, slots=0 * inputs.slots).check(
            vocabulary_size=1, max_model_len=MAX_MODEL_LEN, num_blocks=num_blocks,
            block_size=BLOCK_SIZE, previous_samples=0,
        )  # fmt: skip
        device.check(step_id=0, num_blocks=num_blocks, num_host_blocks=0, previous_samples=0)
        assert (inputs.slots == -1).all(), "a step that stores"
        found.append(inputs)
    return found


def row_slots(num_rows: int) -> int:
    """As attention_call.py has it."""
    return next(
        (slots for slots in (16, 128, 1024) if num_rows <= slots), 1 << num_rows.bit_length()
    )


def is_decode(inputs: StepInputs) -> bool:
    return inputs.num_tokens == inputs.num_rows


def is_mixed(inputs: StepInputs) -> bool:
    return not is_decode(inputs) and inputs.num_rows > 1


@pytest.mark.parametrize("kind", [is_decode, is_mixed])
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 200, 1025, 3000])
def test_every_number_of_rows_that_attention_is_compiled_for(
    rows: int, kind: Callable[[StepInputs], bool]
) -> None:
    """Whatever number of rows comes, a step of its kind and size was there."""
    seen = {row_slots(step.num_rows) for step in steps_of(tokens=8192, rows=rows) if kind(step)}
    least = 2 if kind is is_mixed else 1
    assert seen >= {row_slots(count) for count in range(least, rows + 1)}


def test_every_number_of_tokens_that_products_have_tiles_for() -> None:
    seen = {step.num_tokens for step in steps_of(tokens=2048, rows=8)}
    assert seen >= {*WARM_TOKENS[:-1], 2048}


def test_small_steps_and_caches() -> None:
    assert max(step.num_tokens for step in steps_of(tokens=1, rows=1)) == 1
    assert max(step.num_tokens for step in steps_of(tokens=64, rows=2, num_blocks=1)) == 16


@pytest.mark.parametrize("plan", ["cudagraph", "eager"])
def test_all_of_them_run_and_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: str
) -> None:
    """Opened as a device that compiles is, and as one that does not."""
    save(tiny_model("llama", {"max_position_embeddings": 64}), tmp_path)
    options = BackendOptions(
        device="emulated", block_size=4, max_num_seqs=3, max_num_batched_tokens=20,
        plan="eager" if plan == "eager" else "cudagraph",
    )  # fmt: skip
    model = load_device_model(
        resolve_model(str(tmp_path)), options, lambda *_: None, ALONE, EmulatedDevice()
    )
    logits = []
    for kind in ("emulated", "cuda"):
        monkeypatch.setattr(EmulatedDevice, "kind", kind)
        backend = DeviceBackend(model, 40)
        logits.append(StepDriver(backend).run(list(range(3, 20))))
    np.testing.assert_array_equal(logits[0], logits[1])
    model.device.close()
