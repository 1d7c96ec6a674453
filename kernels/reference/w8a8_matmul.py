"""Products of two quantised factors, plain. Contract: `triptych.kernels.ops.MATMUL`."""

import torch

from triptych.kernels.reference.matmul import matmul
from triptych.kernels.reference.quantized_weights import (
    Float8Weight,
    IntWeight,
    packed,
    unpacked,
    words_of_block,
)

ByteWeight = IntWeight | Float8Weight
"""int8 of whole rows without zero points, or e4m3."""

_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def check_byte_weight(weight: ByteWeight) -> None:
    """Raise ValueError unless activations of 8 bits can meet such a weight."""
    if isinstance(weight, IntWeight) and (weight.bits, weight.group, weight.zeros) != (8, 0, None):
        raise ValueError("activations of 8 bits need int8 of whole rows without zero points")


def padded_columns(weight: ByteWeight) -> int:
    """Columns of the codes that `quantize_tokens` makes for it."""
    return 4 * int(weight.words.shape[1])


def quantize_tokens(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """codes [T, P] and scales float32 [T] with x [T, K] about scales * codes, each row by itself.

    codes int8 or e4m3: a row's largest magnitude becomes 127 or 448, the rest the nearest codes. P
    is K padded to 128s (zeros), and columns have the order of packed words, so that they meet their
    weights there.
    """
    wide = x.to(torch.float32)
    largest = wide.abs().amax(1) if x.shape[1] else wide.new_zeros(len(wide))
    most = _LARGEST[codes.dtype]
    tiny = torch.finfo(torch.float32).tiny
    scales.copy_((largest / most).clamp(min=tiny))
    quotients = (wide / scales[:, None]).clamp(-most, most)
    narrow = quotients.round() if codes.dtype == torch.int8 else quotients
    raw = narrow.to(codes.dtype).view(torch.uint8)
    codes.view(torch.uint8).copy_(packed(raw, 8, words_of_block(0)).view(torch.uint8))


def w8a8_matmul(
    codes: torch.Tensor,
    token_scales: torch.Tensor,
    weight: ByteWeight,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> None:
    """out [T, O] = token_scales * codes [T, P] times what the weight means, transposed, + bias."""
    check_byte_weight(weight)
    words = codes.view(torch.uint8).contiguous().view(torch.int32)
    raw = unpacked(words, 8, words_of_block(0))[:, : weight.columns].to(torch.uint8)
    values = raw.view(codes.dtype).to(torch.float32)
    matmul(values * token_scales[:, None], weight.values(), out, bias)
