"""The gate of a Llama MLP. Contract: `triptych.kernels.ops.SILU_GATE`."""

import torch


def silu_gate(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, with gate and up side by side: [T, 2F] -> [T, F], computed in float32.

    Source: Shazeer 2020 (SwiGLU), arXiv:2002.05202.
    """
    gate, up = gate_up.to(torch.float32).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def gelu_tanh_gate(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up in the tanh form, as above.

    Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.
    """
    gate, up = gate_up.to(torch.float32).chunk(2, dim=-1)
    return (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)
