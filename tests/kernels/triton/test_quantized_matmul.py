"""Products with weights of 4 and 8 bits, against their meaning in float64."""

import pytest
import torch

from gpu_weights import bound, random_float8_weight, random_int_weight
from triptych.kernels.reference import quantized_matmul as plain
from triptych.kernels.reference.quantized_weights import (
    Bits,
    Float8Weight,
    QuantizedWeight,
    packed,
    words_of_block,
)
from triptych.kernels.triton import tiles
from triptych.kernels.triton.quantized_matmul import quantized_matmul

FORMS = [
    *[(4, group, zeros) for group in (0, 32, 64, 128, 256, 512) for zeros in (True, False)],
    *[(8, group, zeros) for group in (0, 32, 64, 128, 256) for zeros in (True, False)],
    (0, 0, False), (0, 128, False),
]  # fmt: skip


def weight_of(bits: int, group: int, zeros: bool, outputs: int, columns: int) -> QuantizedWeight:
    if bits == 0:
        return random_float8_weight(group, outputs, columns)
    kind: Bits = 4 if bits == 4 else 8
    return random_int_weight(kind, group, outputs, columns, zeros=zeros)


def multiply(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    out = torch.full((len(x), weight.outputs), torch.nan, dtype=dtype)
    quantized_matmul(x, weight, out, bias)
    return out


@pytest.mark.parametrize(("bits", "group", "zeros"), FORMS)
def test_every_format(bits: int, group: int, zeros: bool) -> None:
    columns = max(2 * group, 320) if group else 200
    weight = weight_of(bits, group, zeros, 70, columns)
    x = torch.randn(3, columns).to(torch.bfloat16)
    out = multiply(x, weight)
    values = weight.values()
    assert torch.all((out - x.double() @ values.double().T).abs() <= bound(x, values, out))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 2, 17, 33, 70])
def test_tokens_and_dtypes(dtype: torch.dtype, tokens: int) -> None:
    for bits, group, zeros in ((4, 32, True), (8, 0, False), (0, 0, False)):
        weight = weight_of(bits, group, zeros, 65, 160)
        x = torch.randn(tokens, 160).to(dtype)
        bias = torch.randn(65).to(torch.bfloat16)
        out = multiply(x, weight, bias, dtype)
        values = torch.cat((weight.values(), bias.float()[:, None]), 1)
        wide = torch.cat((x, torch.ones(tokens, 1, dtype=dtype)), 1)
        truth = wide.double() @ values.double().T
        fits = truth.abs() < torch.finfo(dtype).max
        assert torch.all(((out - truth).abs() <= bound(wide, values, out))[fits])


def test_no_tokens() -> None:
    weight = random_int_weight(4, 32, 64, 64, zeros=True)
    assert multiply(torch.empty(0, 64, dtype=torch.bfloat16), weight).shape == (0, 64)


@pytest.mark.parametrize(
    ("bits", "group", "zeros"), [(4, 32, True), (8, 128, False), (0, 0, False)]
)
def test_a_row_is_the_same_among_any(bits: int, group: int, zeros: bool) -> None:
    """With runs of columns, which are programs of their own for few tokens and not for many."""
    weight = weight_of(bits, group, zeros, 64, 1024)
    x = torch.randn(70, 1024).to(torch.bfloat16)
    alone = multiply(x[:1], weight)
    for tokens in (2, 17, 40, 70):
        rows = torch.cat((torch.randn(tokens - 1, 1024).to(torch.bfloat16), x[:1]))
        assert torch.equal(multiply(rows, weight)[-1:], alone)


def test_runs_in_turn_are_as_runs_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_int_weight(4, 64, 64, 4096, zeros=True)
    x = torch.randn(20, 4096).to(torch.bfloat16)
    assert tiles.runs_of(64, 4096, 256).count == 4
    apart = multiply(x, weight)
    monkeypatch.setattr(tiles, "_PARTIALS", 0)
    assert torch.equal(multiply(x, weight), apart)


def test_strided_rows() -> None:
    weight = random_int_weight(8, 32, 40, 96, zeros=False)
    wide = torch.randn(5, 200).to(torch.bfloat16)
    wide[:, 96:] = torch.nan
    assert torch.equal(multiply(wide[:, :96], weight), multiply(wide[:, :96].contiguous(), weight))


def test_every_code_of_float8() -> None:
    codes = torch.arange(256).repeat(2, 1)
    codes[(codes & 0x7F) == 0x7F] = 0
    weight = Float8Weight(256, 0, packed(codes, 8, words_of_block(0)), torch.tensor([[1.0, 0.5]]))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        out = multiply(torch.eye(256).to(dtype), weight)
        expected = codes.to(torch.uint8).view(torch.float8_e4m3fn).float() * weight.scales.T
        assert torch.equal(out, expected.T)


@pytest.mark.parametrize("bits", [4, 8])
def test_every_code_and_zero_point(bits: Bits) -> None:
    span = 1 << bits
    low = 0 if bits == 4 else -128
    points = range(low, low + span + 1, 1 if bits == 4 else 16)
    for zero in points:
        weight = random_int_weight(bits, 64, 1, 256, zeros=True)
        assert weight.zeros is not None
        weight.zeros.fill_(zero)
        weight.scales.fill_(1)
        codes = torch.arange(256) % span
        weight.words.copy_(packed(codes[None], bits, weight.block_words))
        signed = codes if bits == 4 else codes - 256 * (codes >= 128)
        expected = (signed - zero).float()
        assert torch.equal(weight.values()[0], expected)
        assert torch.equal(multiply(torch.eye(256)[::37].bfloat16(), weight)[:, 0], expected[::37])


def test_the_twin() -> None:
    for bits, group, zeros in FORMS:
        weight = weight_of(bits, group, zeros, 9, 128 if not group else 2 * group)
        x = torch.randn(2, weight.columns)
        out = torch.empty(2, 9)
        plain.quantized_matmul(x, weight, out)
        values = weight.values()
        assert torch.all((out - x.double() @ values.double().T).abs() <= bound(x, values, out))


@pytest.mark.parametrize(
    ("x", "out"),
    [
        (torch.zeros(1, 65), torch.zeros(1, 64)),
        (torch.zeros(1, 64), torch.zeros(1, 63)),
        (torch.zeros(1, 64, dtype=torch.float64), torch.zeros(1, 64)),
        (torch.zeros(64, 2).T, torch.zeros(2, 64)),
    ],
)
def test_what_does_not_fit_is_refused(x: torch.Tensor, out: torch.Tensor) -> None:
    weight = random_int_weight(4, 32, 64, 64, zeros=True)
    with pytest.raises(ValueError, match=r"fit|supported|contiguous"):
        quantized_matmul(x, weight, out)
