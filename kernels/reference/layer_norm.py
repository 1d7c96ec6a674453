"""Layer norm. Contract: `triptych.kernels.ops.LAYER_NORM`."""

import torch


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """(x - mean) / sqrt(variance + epsilon) * weight + bias over the last axis, in float32.

    x [..., H] of any float dtype, weight and bias float32 [H]; the variance is the biased one.
    The result has x's shape and dtype. Source: Ba et al. 2016, arXiv:1607.06450.
    """
    wide = x.to(torch.float32)
    centred = wide - wide.mean(dim=-1, keepdim=True)
    variance = centred.square().mean(dim=-1, keepdim=True)
    return (centred * torch.rsqrt(variance + epsilon) * weight + bias).to(x.dtype)
