"""Paged attention of the reference operations: a token at a time, so that its numbers depend on its
own sequence only. The meaning is `kernels/reference/paged_attention.py`."""

import torch

from triptych.kernels.reference.kv_codes import kv_values
from triptych.services.executor.device.ops import AttentionForm, AttentionRows, KvLayer


def attend(
    q: torch.Tensor,
    kv: KvLayer,
    rows: AttentionRows,
    row_starts: list[int],
    out: torch.Tensor,
    form: AttentionForm,
) -> None:
    """out [T, N, D]: row r's tokens, row_starts[r] on, are the last of its rows.kv_lengths[r].

    Rows of length 0 get zeros.
    """
    for row, length in enumerate(rows.kv_lengths.tolist()):
        start, stop = row_starts[row], row_starts[row + 1]
        if length == 0:
            out[start:stop].zero_()
            continue
        keys, values = _gathered(kv, rows.block_tables[row], length)
        for token in range(start, stop):
            end = length - (stop - 1 - token)
            first = 0 if form.window is None else max(0, end - form.window)
            out[token].copy_(_attend_one(q[token], keys[first:end], values[first:end], form))


def _gathered(kv: KvLayer, table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a sequence as float32 [length, M, D]."""
    blocks = table[: -(-length // kv.keys.shape[1])].long()
    out = []
    for part, cache in enumerate((kv.keys, kv.values)):
        scales = None if kv.scales is None else kv.scales[part][blocks].flatten(0, 1)[:length]
        out.append(kv_values(cache[blocks].flatten(0, 1)[:length], scales))
    return out[0], out[1]


def _attend_one(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, form: AttentionForm
) -> torch.Tensor:
    """q [N, D] over keys and values [L, M, D] -> float32 [N, D]."""
    kv_heads, head_dim = keys.shape[1:]
    queries = q.to(torch.float32).reshape(kv_heads, -1, head_dim)
    scores = torch.bmm(queries, keys.permute(1, 2, 0).contiguous()) * form.scale
    if form.soft_cap is not None:
        scores = form.soft_cap * torch.tanh(scores / form.soft_cap)
    weights = scores.softmax(-1)
    return torch.bmm(weights, values.transpose(0, 1).contiguous()).reshape(-1, head_dim)
