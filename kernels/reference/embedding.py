"""Rows of an embedding table, or of a part of it. Contract: `triptych.kernels.ops.EMBEDDING`."""

import torch


def embed(token_ids: torch.Tensor, table: torch.Tensor, first: int) -> torch.Tensor:
    """table[token_ids - first], zeros where an id is not in the table: int32 [T] -> [T, H]."""
    rows = token_ids.long() - first
    outside = (rows < 0) | (rows >= len(table))
    return table[rows.masked_fill(outside, 0)].masked_fill(outside.unsqueeze(1), 0)
