"""Causal attention that reads keys and values through block tables.

Contract: `triptych.kernels.ops.PAGED_ATTENTION`. Row by row and head by head, to be read.
"""

from dataclasses import dataclass

import torch

from triptych.kernels.reference.kv_codes import kv_values


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Which tokens are whose. All tensors are integers on the caches' device.

    block_tables [R, B]: block ids of each row's sequence, in order; entries behind the last are
        never read. row_starts [R + 1]: row r owns queries [row_starts[r], row_starts[r + 1]).
    kv_lengths [R]: tokens of the row's sequence after this step; its queries are the last of them.
    """

    block_tables: torch.Tensor
    row_starts: torch.Tensor
    kv_lengths: torch.Tensor


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: PagedRows,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """softmax(scale * q k^T) v, in float32, each query over its own and all earlier positions.

    q [T, N, D]; k_cache, v_cache [blocks, block_size, M, D] with N a multiple of M: query head n
    reads head n // (N / M). The keys and values of the queries' own tokens are already stored.
    `window` W: only the query's own and the W - 1 positions before it. `soft_cap` C: scores s
    become C tanh(s / C) (Gemma 2). `scales` of keys and values, float32 [blocks, block_size, M],
    where caches hold codes (`kv_codes`). Rows of length 0 get zeros. Returns q's shape and dtype.
    """
    out = torch.empty_like(q)
    group = q.shape[1] // k_cache.shape[2]
    block_size = k_cache.shape[1]
    starts = rows.row_starts.tolist()
    k_scales, v_scales = scales or (None, None)
    for row, length in enumerate(rows.kv_lengths.tolist()):
        num_queries = starts[row + 1] - starts[row]
        if length == 0:
            out[starts[row] : starts[row + 1]] = 0
            continue
        blocks = rows.block_tables[row, : -(-length // block_size)].long()
        keys, values = (
            kv_values(cache[blocks], None if scale is None else scale[blocks]).flatten(0, 1)[
                :length
            ]
            for cache, scale in ((k_cache, k_scales), (v_cache, v_scales))
        )
        positions = torch.arange(length - num_queries, length).unsqueeze(1)
        distance = positions - torch.arange(length)
        visible = distance >= 0
        if window is not None:
            visible &= distance < window
        for head in range(q.shape[1]):
            queries = q[starts[row] : starts[row + 1], head].to(torch.float32)
            scores = scale * queries @ keys[:, head // group].T
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
            out[starts[row] : starts[row + 1], head] = (weights @ values[:, head // group]).to(
                q.dtype
            )
    return out
