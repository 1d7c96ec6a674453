"""Work for an emulated device, and numbers for it."""

import torch

from triptych.services.executor.device.emulated_trace import kernel


@kernel
def double_into(x: torch.Tensor, out: torch.Tensor, factor: float = 2.0) -> None:
    """As a Triton kernel: reads values, which a launch from the host may not."""
    for place, value in enumerate(x.tolist()):
        out[place] = value * factor


def host(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32)
