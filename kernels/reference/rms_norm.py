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


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """residual += x, rounded to its dtype, in place; then its norm. x, residual [T, H]."""
    residual.copy_(residual.to(torch.float32) + x.to(torch.float32))
    return rms_norm(residual, weight, epsilon)
