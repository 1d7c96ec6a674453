"""Causal attention over the paged cache: launchers. Meaning: `kernels.reference.paged_attention`.

A token's result has the same bits whether it was decoded or prefilled, however its prompt was cut,
and whatever else was computed with it: see `attention_forms`.
"""

from collections.abc import Iterator

import torch
import triton

from triptych.kernels.triton.attention_call import AttentionCall
from triptych.kernels.triton.attention_forms import PARTITION, few_queries
from triptych.kernels.triton.attention_variants import attention_variants
from triptych.kernels.triton.variants import Variant

Scales = tuple[torch.Tensor, torch.Tensor]

_WORKSPACE_BYTES = 256 << 20


def decode_workspace(
    max_rows: int, num_heads: int, head_dim: int, max_model_len: int, max_bytes: int | None = None
) -> int:
    """float32 elements that attention wants for up to `max_rows` sequences.

    At most `max_bytes` (256 MiB unless given), whatever the arguments: sequences that find no room
    there are computed by one program a key-value head each, right but slowly. It takes many long
    ones: the bound holds 4 million tokens of a model with 32 heads of 128.
    """
    result = num_heads * (head_dim + 2)
    results = max_rows * triton.cdiv(max_model_len, PARTITION)
    most = (_WORKSPACE_BYTES if max_bytes is None else max_bytes) // (4 * result)
    return int(min(results, max(most, 1)) * result)


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    kv_lengths: torch.Tensor,
    out: torch.Tensor,
    workspace: torch.Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    scales: Scales | None = None,
) -> None:
    """Write out [R, N, D]: each row's query, the last of its kv_lengths int32 [R], attends to all.

    q [R, N, D] (may be strided, D contiguous); caches [blocks, block_size, M, D] of q's dtype,
    float32, float16, bfloat16, or int8 / float8_e4m3fn with `scales` float32 [blocks, block_size,
    M] of keys and values; block_tables int32 [R, B]. Rows of length 0 are padding: out is 0 and
    nothing of them is read. workspace: float32 [decode_workspace(...)], contents are of no account.
    Launches the same grids whatever the tensors hold. Raises ValueError for shapes that there are
    no kernels for.
    """
    if len(q) == 0:
        return
    call = AttentionCall(
        q, k_cache, v_cache, block_tables, None, kv_lengths, out, scale, window, soft_cap, scales
    )
    call.check()
    room = call.split(workspace, 1)
    if room < len(q) * triton.cdiv(call.longest, PARTITION):
        call.whole(1, room)


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    row_starts: torch.Tensor,
    kv_lengths: torch.Tensor,
    block_tables: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    scales: Scales | None = None,
    workspace: torch.Tensor | None = None,
) -> None:
    """Write out [T, N, D]: row r's tokens, from row_starts int32 [R + 1] on, are its last ones.

    All else as `decode_attention`. With a workspace, sequences of few tokens (a decode step among
    prompts, the end of a prompt, drafts) are split along the keys as there; the bits are the same.
    Tokens that belong to no row are left alone.
    """
    num_rows = len(kv_lengths)
    if len(q) == 0 or num_rows == 0:
        return
    call = AttentionCall(
        q, k_cache, v_cache, block_tables, row_starts, kv_lengths, out, scale, window, soft_cap,
        scales,
    )  # fmt: skip
    call.check()
    few = few_queries(call.tiles.decode.rows, call.group)
    if workspace is None or (num_rows == 1 and len(q) > few):
        call.whole()
    else:
        call.whole(few, call.split(workspace, few))


def variants() -> Iterator[Variant]:
    """What the launchers use."""
    yield from attention_variants()
