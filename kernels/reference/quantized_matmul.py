"""Products with quantised weights, plain. Contract: `triptych.kernels.ops.MATMUL`."""

import torch

from triptych.kernels.reference.matmul import matmul
from triptych.kernels.reference.quantized_weights import QuantizedWeight


def quantized_matmul(
    x: torch.Tensor,
    weight: QuantizedWeight,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> None:
    """out [T, O] = x [T, K] times what the weight means, transposed, + bias [O], in float32."""
    matmul(x.to(torch.float32), weight.values(), out, bias)
