"""Root mean square norm. Contract: `triptych.kernels.ops.RMS_NORM`."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last axis, computed in float32.

    x [..., H] of any float dtype, weight float32 [H]; the result has x's shape and dtype.
    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    wide = x.to(torch.float32)
    mean_square = wide.square().mean(dim=-1, keepdim=True)
    return (wide * torch.rsqrt(mean_square + epsilon) * weight).to(x.dtype)
