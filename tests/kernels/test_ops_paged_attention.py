"""paged_attention: reference against float64 over contiguous tensors, eager against reference."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from triptych.engine_core.layout import STEP_HEADER, StepLayout
from triptych.kernels.ops import PAGED_ATTENTION, Dtype
from triptych.kernels.reference.paged_attention import PagedRows, paged_attention
from triptych.services.executor.eager_attention import attention_inputs, eager_attention
from triptych.services.executor.kv_storage import KvStorage
from triptych.services.executor.model_config import ModelConfig, Rope
from triptych.services.executor.step_inputs import StepInputs

torch.set_num_threads(1)  # the suite shares its cores

BLOCK, WIDTH, BLOCKS = 4, 8, 64
# (queries, tokens of the sequence): whole prompts, chunks, single tokens; block borders and beyond.
ROWS = {
    "one_token": [(1, 1)],
    "decode_equal": [(1, 8), (1, 8)],
    "decode_ragged": [(1, 1), (1, 4), (1, 5), (1, 31), (1, 17), (1, 16)],
    "prefill": [(7, 7)],
    "chunk": [(3, 12)],
    "mixed": [(1, 9), (5, 5), (1, 2), (4, 20), (1, 30)],
}


def config(heads: int, kv_heads: int, window: int | None, cap: float | None = None) -> ModelConfig:
    return ModelConfig(
        source="test", architecture="t", family="llama", vocabulary_size=8, hidden_size=8,
        intermediate_size=8, num_layers=1, num_heads=heads, num_kv_heads=kv_heads, head_dim=8,
        max_position=BLOCK * WIDTH, norm_epsilon=1e-5, activation="silu", tied_head=True,
        rope=Rope(1e4), sliding_window=window, attention_soft_cap=cap,
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    storage: KvStorage
    q: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    inputs: StepInputs


def make(rows: list[tuple[int, int]], shape: ModelConfig, dtype: torch.dtype) -> Case:
    """Sequences in shuffled blocks; whatever no sequence owns is NaN in blocks never given out."""
    torch.manual_seed(len(rows))
    storage = KvStorage(shape, BLOCKS, BLOCK, dtype)
    keys_of_blocks, values_of_blocks = storage.layer(0)
    order = [int(block) for block in np.random.default_rng(1).permutation(BLOCKS)]
    layout = StepLayout(1, 64, 8, WIDTH, 8)
    slot = memoryview(bytearray(layout.slot_bytes))
    total = sum(count for count, _ in rows)
    STEP_HEADER.pack_into(slot, 0, 1, total, len(rows), 0, 0)

    def array(name: str) -> np.ndarray:
        offset, dims = layout.arrays[name]
        return np.frombuffer(slot, np.int32, int(np.prod(dims)), offset).reshape(dims)

    array("block_tables")[:] = -1
    keys, values, at = [], [], 0
    for row, (count, length) in enumerate(rows):
        blocks = [order.pop() for _ in range(-(-length // BLOCK))]
        keys.append(torch.randn(length, shape.num_kv_heads, 8).to(dtype))
        values.append(torch.randn(length, shape.num_kv_heads, 8).to(dtype))
        positions = np.arange(length)
        slots = np.array(blocks)[positions // BLOCK] * BLOCK + positions % BLOCK
        storage.store(0, torch.from_numpy(slots), keys[row], values[row])
        array("block_tables")[row, : len(blocks)] = blocks
        array("kv_lengths")[row] = length
        array("slots")[at : at + count] = slots[length - count :]
        at += count
        array("row_starts")[row + 1] = at
    unused = torch.tensor(order)
    keys_of_blocks[unused] = float("nan")
    values_of_blocks[unused] = float("nan")
    q = torch.randn(total, shape.num_heads, 8).to(dtype)
    return Case(storage, q, keys, values, StepInputs.view(slot, layout))


def truth(case: Case, window: int | None, cap: float | None) -> torch.Tensor:
    """Plain attention in float64, one query at a time."""
    out, at = [], 0
    starts = case.inputs.row_starts
    for row, keys in enumerate(case.keys):
        count, length = int(starts[row + 1] - starts[row]), len(keys)
        group = case.q.shape[1] // keys.shape[1]
        k = keys.double().repeat_interleave(group, 1)
        v = case.values[row].double().repeat_interleave(group, 1)
        for position in range(length - count, length):
            first = 0 if window is None else max(0, position - window + 1)
            seen = slice(first, position + 1)
            scores = torch.einsum("nd,lnd->nl", case.q[at].double(), k[seen]) * 8**-0.5
            if cap is not None:
                scores = cap * torch.tanh(scores / cap)
            out.append(torch.einsum("nl,lnd->nd", scores.softmax(-1), v[seen]))
            at += 1
    return torch.stack(out)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("window", "cap"), [(None, None), (3, None), (None, 0.7), (3, 2.0)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (3, 1), (2, 2)])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_paged_attention(
    rows: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    window: int | None,
    cap: float | None,
    dtype: Dtype,
) -> None:
    shape = config(heads, kv_heads, window, cap)
    case = make(rows, shape, getattr(torch, dtype))
    paged = PagedRows(
        torch.from_numpy(case.inputs.block_tables.copy()),
        torch.from_numpy(case.inputs.row_starts.copy()),
        torch.from_numpy(case.inputs.kv_lengths.copy()),
    )
    keys, values = case.storage.layer(0)
    expected = truth(case, window, cap)
    bound = PAGED_ATTENTION.tolerance(dtype)
    allowed = bound.absolute + bound.relative * expected.abs()
    plain = paged_attention(case.q, keys, values, paged, 8**-0.5, window, cap)
    assert ((plain.double() - expected).abs() <= allowed).all()
    prepared = attention_inputs(case.inputs, shape, BLOCK, case.q.dtype)
    eager = eager_attention(case.q, case.storage, 0, prepared)
    assert ((eager.double() - expected).abs() <= allowed).all()
