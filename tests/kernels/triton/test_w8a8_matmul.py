"""Products of weights and activations of 8 bits."""

import pytest
import torch

from gpu_weights import bound, random_float8_weight, random_int_weight
from triptych.kernels.reference import w8a8_matmul as plain
from triptych.kernels.reference.quantized_weights import IntWeight
from triptych.kernels.triton.w8a8_matmul import quantize_tokens, w8a8_matmul

KINDS = ["int8", "fp8", "fp8 groups"]


def weight_of(kind: str, outputs: int, columns: int) -> plain.ByteWeight:
    if kind == "int8":
        return random_int_weight(8, 0, outputs, columns, zeros=False)
    return random_float8_weight(128 if kind == "fp8 groups" else 0, outputs, columns)


def quantized(x: torch.Tensor, weight: plain.ByteWeight) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.int8 if isinstance(weight, IntWeight) else torch.float8_e4m3fn
    codes = torch.empty(len(x), plain.padded_columns(weight), dtype=dtype)
    codes.view(torch.uint8).fill_(0x55)
    scales = torch.empty(len(x))
    quantize_tokens(x, codes, scales)
    return codes, scales


def in_order(codes: torch.Tensor, columns: int) -> torch.Tensor:
    """Codes as float32, by column: byte 4 w + 2 h + p of 128 is column 64 p + 2 w + h."""
    blocks = codes.to(torch.float32).view(len(codes), codes.shape[1] // 128, 32, 2, 2)
    return blocks.permute(0, 1, 4, 2, 3).reshape(codes.shape)[:, :columns]


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tokens_are_rounded_to_the_nearest(kind: str, dtype: torch.dtype) -> None:
    weight = weight_of(kind, 4, 1100)
    x = (torch.randn(6, 1100) * 10.0 ** torch.randint(-3, 4, (6, 1))).to(dtype)
    x[2] = 0
    x[3, :7] = 1e-30
    codes, scales = quantized(x, weight)
    got = in_order(codes, 1100)
    most = 127 if kind == "int8" else 448
    largest = x.double().abs().amax(1)
    assert torch.allclose(scales.double(), largest / most, rtol=1e-6, atol=1.2e-38)
    exact = x.double() / scales.double()[:, None]
    step = torch.ones_like(exact)
    if kind == "fp8":
        step = 2.0 ** (exact.abs().clamp(min=2.0**-6).log2().floor() - 3)
    assert torch.all((got - exact).abs() <= step * 0.5001)
    assert torch.all(codes.view(torch.uint8).view(6, -1, 32, 2, 2)[:, 8, 6:, :, 1] == 0)  # padding
    twin, twin_scales = torch.empty_like(codes), torch.empty_like(scales)
    plain.quantize_tokens(x, twin, twin_scales)
    assert torch.equal(scales, twin_scales)
    assert torch.equal(codes.view(torch.uint8), twin.view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [0, 1, 2, 17, 33, 70])
def test_as_the_truth(kind: str, tokens: int) -> None:
    weight = weight_of(kind, 70, 200)
    codes, scales = quantized(torch.randn(tokens, 200).bfloat16(), weight)
    bias = torch.randn(70)
    out = torch.full((tokens, 70), torch.nan, dtype=torch.bfloat16)
    w8a8_matmul(codes, scales, weight, out, bias)
    x = torch.cat((in_order(codes, 200) * scales[:, None], torch.ones(tokens, 1)), 1)
    values = torch.cat((weight.values(), bias[:, None]), 1)
    # Hopper aligns sums of e4m3 products to 14 bits.
    allowed = bound(x, values, out, 2.0**-19 if kind == "int8" else 2.0**-11)
    assert torch.all((out - x.double() @ values.double().T).abs() <= allowed)
    twin = torch.empty_like(out)
    plain.w8a8_matmul(codes, scales, weight, twin, bias)
    assert torch.all((twin - out).abs() <= 2 * allowed)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_among_any(kind: str) -> None:
    weight = weight_of(kind, 64, 1024)
    x = torch.randn(70, 1024).bfloat16()
    codes, scales = quantized(x, weight)
    alone = torch.empty(1, 64)
    w8a8_matmul(codes[:1], scales[:1], weight, alone)
    for tokens in (2, 40, 70):
        out = torch.empty(tokens, 64)
        w8a8_matmul(codes[:tokens], scales[:tokens], weight, out)
        assert torch.equal(out[:1], alone)


def test_what_does_not_fit_is_refused() -> None:
    weight = weight_of("int8", 8, 128)
    out = torch.empty(1, 8)
    codes, scales = quantized(torch.zeros(1, 128), weight)
    for other in (
        random_int_weight(8, 32, 8, 128, zeros=False),
        random_int_weight(8, 0, 8, 128, zeros=True),
        random_int_weight(4, 0, 8, 256, zeros=False),
    ):
        with pytest.raises(ValueError, match="need int8 of whole rows"):
            w8a8_matmul(codes, scales, other, out)
    with pytest.raises(ValueError, match="fit"):
        w8a8_matmul(codes, scales, weight_of("fp8", 8, 128), out)
    with pytest.raises(ValueError, match="fit"):
        w8a8_matmul(codes, scales, weight_of("int8", 9, 128), out)
    with pytest.raises(ValueError, match="fit"):
        quantize_tokens(torch.zeros(1, 129), codes, scales)
