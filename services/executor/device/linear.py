"""Matrices that activations are multiplied by: one type for each way that weights are kept."""

from dataclasses import dataclass
from typing import Protocol

import torch

from triptych.kernels.reference.quantized_weights import QuantizedWeight
from triptych.services.executor.device.ops import Ops


class Linear(Protocol):
    """x W^T + b of W [outputs, inputs], as a rank of a group has it."""

    @property
    def outputs(self) -> int:
        """Columns of what `apply` writes."""

    def apply(self, ops: Ops, x: torch.Tensor, out: torch.Tensor) -> None:
        """out [T, outputs] = x [T, inputs] W^T + b."""


@dataclass(frozen=True, slots=True)
class DenseLinear:
    """Weights of the model's own dtype."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    @property
    def outputs(self) -> int:
        """As `Linear.outputs`."""
        return int(self.weight.shape[0])

    def apply(self, ops: Ops, x: torch.Tensor, out: torch.Tensor) -> None:
        """As `Linear.apply`."""
        ops.matmul(x, self.weight, out, self.bias)


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """Codes and scales, dequantised as they are read."""

    weight: QuantizedWeight
    bias: torch.Tensor | None = None

    @property
    def outputs(self) -> int:
        """As `Linear.outputs`."""
        return self.weight.outputs

    def apply(self, ops: Ops, x: torch.Tensor, out: torch.Tensor) -> None:
        """As `Linear.apply`."""
        ops.quantized_matmul(x, self.weight, out, self.bias)


def linear(weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None = None) -> Linear:
    """The Linear of a weight."""
    if isinstance(weight, torch.Tensor):
        return DenseLinear(weight, bias)
    return QuantizedLinear(weight, bias)
