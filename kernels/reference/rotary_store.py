"""Rotary embedding and the write of keys and values, at once."""

import torch

from triptych.kernels.reference.kv_codes import kv_codes
from triptych.kernels.reference.rotary import rotary


def rotary_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Rotate q in place (`rotary.rotary`); rotate k, store it and v at the tokens' slots.

    qkv [T, (N + 2M) * D]; positions int32 [T]; cos_sin float32 [P, D], cosines | sines of the
    pairs; slots int32 [T], place of a token in the cache, -1 for padding: such tokens are left
    alone. Caches [blocks, block_size, M, D] of floats, or of int8 / float8_e4m3fn with `scales`
    float32 [blocks, block_size, M] of keys and values (`kv_codes`). Keys are rounded to qkv's
    dtype first. The columns of k hold anything afterwards.
    """
    num_kv_heads, head_dim = k_cache.shape[2:]
    tokens = torch.nonzero(slots >= 0).squeeze(1)
    heads = qkv.view(len(qkv), -1, head_dim)
    q, k, v = heads[tokens].split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    cos, sin = cos_sin[positions[tokens].long()].chunk(2, dim=-1)
    heads[tokens, :num_heads] = rotary(q, cos, sin)
    places = slots[tokens].long()
    for cache, scale, rows in zip(
        (k_cache, v_cache), scales or (None, None), (rotary(k, cos, sin), v), strict=True
    ):
        where = (places // cache.shape[1], places % cache.shape[1])
        if scale is None:
            cache[where] = rows.to(cache.dtype)
        else:
            codes, scale[where] = kv_codes(rows, cache.dtype)
            # float8 has no indexed writes everywhere; its bytes have.
            cache.view(torch.uint8)[where] = codes.view(torch.uint8)
