"""The gates of MLPs: silu(gate) * up, and with the tanh form of GELU."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from triptych.kernels.triton.variants import Variant

_BLOCK = 1024


@triton.jit
def _gate_kernel(gate_up, out, stride, out_stride, size, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = lanes < size
    gate = tl.load(gate_up + row * stride + lanes, mask=within, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + size + lanes, mask=within, other=0.0).to(tl.float32)
    if GELU:
        # 1/2 (1 + tanh(u)) is the logistic function of 2u.
        x = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    else:
        x = gate
    active = gate / (1.0 + tl.exp(-x))
    tl.store(out + row * out_stride + lanes, (active * up).to(out.dtype.element_ty), mask=within)


def silu_gate(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """out [T, F] = silu(gate) * up of gate_up [T, 2F] (gate | up), computed in float32."""
    _launch(gate_up, out, gelu=False)


def gelu_tanh_gate(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """The same with gelu(x) = x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
    _launch(gate_up, out, gelu=True)


def _launch(gate_up: torch.Tensor, out: torch.Tensor, *, gelu: bool) -> None:
    tokens, size = out.shape
    if tokens:
        _gate_kernel[(tokens, triton.cdiv(size, _BLOCK))](
            gate_up, out, gate_up.stride(0), out.stride(0), size, GELU=gelu, BLOCK=_BLOCK
        )


def variants() -> Iterator[Variant]:
    """All of them."""
    integers = ("stride", "out_stride", "size")
    for dtype in ("bf16", "fp16", "fp32"):
        for gelu in (False, True):
            arguments = {
                "gate_up": f"*{dtype}",
                "out": f"*{dtype}",
                **dict.fromkeys(integers, "i32"),
            }
            yield Variant(
                f"{dtype}-{'gelu_tanh' if gelu else 'silu'}", _gate_kernel, arguments,
                {"GELU": gelu, "BLOCK": _BLOCK}, aligned=frozenset(integers),
            )  # fmt: skip
