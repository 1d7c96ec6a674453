"""Steps that use every kernel in every size that kernels tell apart, so that none is compiled while
somebody waits for a token."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from triptych.services.executor.device.capacity import StepCapacity
from triptych.services.executor.device.runtime import NO_DEVICE_INPUTS, largest_step
from triptych.services.executor.device_inputs import DeviceInputs
from triptych.services.executor.step_inputs import StepInputs

WARM_TOKENS = (16, 32, 64, 128, 192, 256, 1024, 1 << 30)
"""Numbers of tokens that products are computed otherwise for: by other tiles, in two tiles of 128
tokens, by the vendor's library."""
_ROW_SLOTS = (16, 128, 1024)
"""Numbers of rows that attention is compiled for (kernels/triton/attention_call.py); beyond, powers
of two."""
_NONE = np.empty(0, np.int32)


def warm_steps(
    capacity: StepCapacity, max_model_len: int, block_size: int, num_blocks: int
) -> Iterator[tuple[StepInputs, DeviceInputs]]:
    """All fit the capacity and a cache of `num_blocks`, and store nothing. The first is small."""
    most = min(capacity.tokens, num_blocks * block_size)
    for tokens in dict.fromkeys(min(tokens, most) for tokens in WARM_TOKENS):
        yield largest_step(replace(capacity, tokens=tokens), max_model_len, block_size)
    for rows in _row_counts(capacity.rows):
        yield _short_rows(rows, 1), NO_DEVICE_INPUTS
        if rows > 1 and rows < capacity.tokens and min(max_model_len, num_blocks * block_size) > 1:
            yield _short_rows(rows, 2), NO_DEVICE_INPUTS


def _row_counts(most: int) -> Iterator[int]:
    """The least number of each size, and where that is one row, two: decode and mixed steps."""
    yield 1
    count, slots = 2, [*_ROW_SLOTS]
    while count <= most:
        yield count
        last = slots.pop(0) if slots else 2 * (count - 1)
        count = last + 1


def _short_rows(num_rows: int, first_tokens: int) -> StepInputs:
    """Rows of one token, but for the first: a decode step, or decoding rows beside a prompt."""
    counts = np.array([first_tokens, *[1] * (num_rows - 1)], np.int32)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    num_tokens = int(starts[-1])
    positions = np.zeros(num_tokens, np.int32)
    positions[:first_tokens] = np.arange(first_tokens)
    return StepInputs(
        step_id=0,
        token_ids=np.zeros(num_tokens, np.int32),
        positions=positions,
        slots=np.full(num_tokens, -1, np.int32),
        row_starts=starts,
        kv_lengths=counts,
        logits_tokens=np.zeros(1, np.int32),
        copy_sources=_NONE,
        copy_targets=_NONE,
        block_tables=np.zeros((num_rows, 1 if first_tokens == 1 else 2), np.int32),
    )
