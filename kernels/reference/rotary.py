"""Rotary position embedding, halves paired. Contract: `triptych.kernels.ops.ROTARY`."""

import torch


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each pair (x[i], x[i + D/2]) of every head by the angle of its token.

    x [T, N, D] of any float dtype, cos and sin float32 [T, D/2]; computed in float32, the result
    has x's shape and dtype. Source: Su et al. 2021, arXiv:2104.09864, in GPT-NeoX's pairing, which
    Hugging Face checkpoints use (GGUF `llama` files pair neighbours; their rows are put back).
    """
    first, second = x.to(torch.float32).chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)
