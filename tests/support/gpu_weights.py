"""Random quantised weights of every format that the GPU kernels read."""

import torch

from triptych.kernels.reference.quantized_weights import (
    Bits,
    Float8Weight,
    IntWeight,
    block_columns,
    packed,
    words_of_block,
)


def random_int_weight(
    bits: Bits,
    group: int,
    outputs: int,
    columns: int,
    *,
    zeros: bool,
    scale_dtype: torch.dtype = torch.float16,
) -> IntWeight:
    """Any codes and zero points; scales over ten orders of magnitude, of both signs, some zero."""
    codes = torch.randint(0, 1 << bits, (outputs, columns))
    padded = -(-columns // block_columns(bits, group)) * block_columns(bits, group)
    groups = max(padded // group, 1) if group else 1
    scales = torch.randn(groups, outputs) * 10.0 ** torch.randint(-6, 4, (groups, outputs))
    scales[torch.rand(groups, outputs) < 0.1] = 0
    low, high = (0, 17) if bits == 4 else (-128, 129)  # GPTQ's first format reaches one more
    points = torch.randint(low, high, (groups, outputs))
    return IntWeight(
        bits=bits,
        columns=columns,
        group=group,
        words=packed(codes, bits, words_of_block(group)),
        scales=scales.to(scale_dtype),
        zeros=points.to(torch.int8 if bits == 4 else torch.int16) if zeros else None,
    )


def random_float8_weight(group: int, outputs: int, columns: int) -> Float8Weight:
    """Any values but NaN, denormals among them; scales over ten orders of magnitude."""
    codes = torch.randint(0, 256, (outputs, columns))
    codes[(codes & 0x7F) == 0x7F] = 0
    groups = -(-columns // group) if group else 1
    scales = torch.randn(groups, outputs) * 10.0 ** torch.randint(-6, 4, (groups, outputs))
    return Float8Weight(columns, group, packed(codes, 8, words_of_block(group)), scales)


def bound(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, share: float = 2.0**-19
) -> torch.Tensor:
    """How far sums in float32 may be from the truth, and one rounding to `out`'s dtype.

    float64 [T, O] of x [T, K] and the weight's values [O, K]: a share of the sum of magnitudes.
    """
    magnitudes = x.double().abs() @ weight.double().abs().T
    rounding = torch.finfo(out.dtype).eps / 2 if out.dtype != torch.float32 else 0.0
    exact = (x.double() @ weight.double().T).abs()
    return magnitudes * share + exact * rounding + torch.finfo(out.dtype).tiny
