"""Paged attention of the eager plan: rows gathered into few calls of torch's own attention.

The meaning is `kernels/reference/paged_attention.py`. Rows that decode one token are put together
where their lengths are within a factor of two; a prefill chunk is a call of its own. What does not
depend on the layer (indices, masks) is made once a step.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name that all torch code uses

from triptych.services.executor.kv_storage import KvStorage
from triptych.services.executor.model_config import ModelConfig
from triptych.services.executor.step_inputs import StepInputs


@dataclass(frozen=True, slots=True)
class _Group:
    """R rows of n queries each: R = 1, or n = 1. `tokens` selects them from the step's tokens.

    blocks int64 [R * B]; mask [R, 1, n, B * block_size], 0 where a key is seen, -inf elsewhere.
    """

    tokens: slice | torch.Tensor
    num_rows: int
    blocks: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """What attention needs of a step, the same in every layer. slots and fresh_blocks are int64."""

    slots: torch.Tensor
    fresh_blocks: torch.Tensor
    groups: tuple[_Group, ...]
    soft_cap: float | None = None


def attention_inputs(
    inputs: StepInputs, config: ModelConfig, block_size: int, dtype: torch.dtype
) -> AttentionInputs:
    """Prepare a step. `dtype` is the queries'."""
    slots = inputs.slots.astype(np.int64)
    fresh = slots[slots % block_size == 0] // block_size
    return AttentionInputs(
        slots=torch.from_numpy(slots),
        fresh_blocks=torch.from_numpy(fresh),
        groups=tuple(
            _group(inputs, rows, config.sliding_window, block_size, dtype)
            for rows in _row_groups(inputs, block_size)
        ),
        soft_cap=config.attention_soft_cap,
    )


def _row_groups(inputs: StepInputs, block_size: int) -> Iterator[list[int]]:
    """Rows that share a call: single-token rows by power of two of their blocks, others alone."""
    decoding: dict[int, list[int]] = {}
    counts = np.diff(inputs.row_starts)
    for row, (count, length) in enumerate(
        zip(counts.tolist(), inputs.kv_lengths.tolist(), strict=True)
    ):
        if count == 1:
            num_blocks = -(-length // block_size)
            decoding.setdefault((num_blocks - 1).bit_length(), []).append(row)
        else:
            yield [row]
    yield from decoding.values()


def _group(
    inputs: StepInputs,
    rows: list[int],
    window: int | None,
    block_size: int,
    dtype: torch.dtype,
) -> _Group:
    starts = inputs.row_starts[rows]
    lengths = inputs.kv_lengths[rows]
    first, last = rows[0], rows[-1]
    num_queries = int(inputs.row_starts[first + 1] - inputs.row_starts[first])
    tokens: slice | torch.Tensor
    if len(rows) == last - first + 1:  # neighbours: a view instead of a gather
        tokens = slice(int(starts[0]), int(inputs.row_starts[last + 1]))
    else:
        tokens = torch.from_numpy(starts.astype(np.int64))
    blocks_of_row = -(-lengths // block_size)
    width = int(blocks_of_row.max())
    tables = inputs.block_tables[rows, :width].astype(np.int64)
    # Padding repeats the row's own first block, so a row reads no numbers but its own.
    tables = np.where(np.arange(width) < blocks_of_row[:, None], tables, tables[:, :1])
    positions = lengths[:, None] - num_queries + np.arange(num_queries)  # of the queries, [R, n]
    distance = positions[:, :, None] - np.arange(width * block_size)
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(
        torch.from_numpy(~visible), -torch.inf
    )
    return _Group(tokens, len(rows), torch.from_numpy(tables.reshape(-1)), mask.unsqueeze(1))


def eager_attention(
    q: torch.Tensor, storage: KvStorage, layer: int, inputs: AttentionInputs
) -> torch.Tensor:
    """Attention of a step's queries [T, heads, head_dim] over the stored keys and values.

    Scale head_dim^-0.5. The step's own keys and values are stored before. Returns the same shape.
    """
    groups = inputs.groups
    if len(groups) == 1:
        return _attend(q, storage, layer, groups[0], inputs.soft_cap)
    out = torch.empty_like(q)
    for group in groups:
        out[group.tokens] = _attend(q[group.tokens], storage, layer, group, inputs.soft_cap)
    return out


def _attend(
    q: torch.Tensor, storage: KvStorage, layer: int, group: _Group, soft_cap: float | None
) -> torch.Tensor:
    keys, values = storage.layer(layer)
    kv_heads, head_dim = keys.shape[2:]
    rows, tokens, heads = group.num_rows, q.shape[0], q.shape[1]
    shared = heads // kv_heads  # query heads per key-value head
    # [R * B, block_size, M, D] -> [R, M, B * block_size, D]
    k = keys.index_select(0, group.blocks).view(rows, -1, kv_heads, head_dim).transpose(1, 2)
    v = values.index_select(0, group.blocks).view(rows, -1, kv_heads, head_dim).transpose(1, 2)
    if rows == tokens:  # one query a row: its heads that share keys are the queries of one product
        out = _softmax_of_scores(
            q.view(rows, kv_heads, shared, head_dim), k, v, group.mask, soft_cap
        )
        return out.reshape(tokens, heads, head_dim)
    # One row: the heads that share keys lie along the batch, so that one mask serves all of them.
    queries = q.view(tokens, kv_heads, shared, head_dim).permute(2, 1, 0, 3)
    out = _softmax_of_scores(
        queries,
        k.expand(shared, -1, -1, -1),
        v.expand(shared, -1, -1, -1),
        group.mask,
        soft_cap,
    )
    return out.permute(2, 1, 0, 3).reshape(tokens, heads, head_dim)


def _softmax_of_scores(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, soft_cap: float | None
) -> torch.Tensor:
    """[..., n, D] queries over [..., L, D] keys and values. torch's own call knows no cap."""
    if soft_cap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    scores = (q @ k.transpose(-1, -2)).to(torch.float32) * q.shape[-1] ** -0.5
    scores = soft_cap * torch.tanh(scores / soft_cap) + mask
    return scores.softmax(-1).to(v.dtype) @ v
