"""Parts that the families share."""

import torch
import torch.nn.functional as F  # noqa: N812 - the name that all torch code uses

from triptych.services.executor.model_config import Activation


class Linear:
    """x W^T + b, with W [outputs, inputs]; the bias is absent unless asked for.

    Several matrices over the same input are one Linear; `part` gives the place of each.
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype) -> None:
        self.weight = torch.empty((outputs, inputs), dtype=dtype)
        self.bias = torch.empty(outputs, dtype=dtype) if bias else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, inputs] -> [T, outputs]."""
        return F.linear(x, self.weight, self.bias)

    def part(self, name: str, start: int, size: int) -> dict[str, torch.Tensor]:
        """Parameters `name`.weight and, if any, `name`.bias: outputs [start, start + size)."""
        out = {f"{name}.weight": self.weight[start : start + size]}
        if self.bias is not None:
            out[f"{name}.bias"] = self.bias[start : start + size]
        return out


def activate(x: torch.Tensor, kind: Activation) -> torch.Tensor:
    """The activation of an MLP without gate, elementwise; computed in float32, in x's dtype."""
    wide = x.to(torch.float32)
    match kind:
        case "silu":
            wide = F.silu(wide)
        case "gelu_tanh":
            wide = F.gelu(wide, approximate="tanh")
        case "gelu":
            wide = F.gelu(wide)
        case "relu":
            wide = F.relu(wide)
    return wide.to(x.dtype)
