"""Keys and values as scaled codes: what int8 and float8 caches hold."""

import torch

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""What the largest number of a head becomes, by the cache's dtype."""
_LEAST_SCALE = 1e-30


def kv_codes(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes of x's shape and `dtype`, scales float32 [..., M]) of x [..., M, D].

    A token's head has one scale: its largest magnitude over what `dtype` holds. A number is divided
    by it in float32 and rounded to the nearest code, to the even one of two. Scales of at most
    1e-30 have codes of 0; heads with NaN or infinity have a scale of NaN and codes of 0.
    """
    wide = x.to(torch.float32)
    largest = wide.abs().amax(dim=-1)
    scales = torch.where(largest < torch.inf, largest / LARGEST[dtype], torch.nan)
    scaled = torch.where((scales > _LEAST_SCALE).unsqueeze(-1), wide / scales.unsqueeze(-1), 0.0)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scales


def kv_values(codes: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """What codes [..., M, D] with scales [..., M] stand for, float32; floats have no scales."""
    wide = codes.to(torch.float32)
    return wide if scales is None else wide * scales.unsqueeze(-1)
