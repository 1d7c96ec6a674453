"""Products of matrices, plain. Contract: `triptych.kernels.ops.MATMUL`."""

import torch


def matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> None:
    """out [T, O] = x [T, K] weight [O, K]^T + bias [O], in float32, rounded once to out's dtype.

    Row by row, so that a row's bits do not depend on how many there are.
    """
    wide = weight.to(torch.float32)
    for row, token in enumerate(x.to(torch.float32)):
        sums = torch.mv(wide, token)
        out[row] = sums if bias is None else sums + bias.to(torch.float32)
