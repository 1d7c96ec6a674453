"""Products of float matrices."""

import pytest
import torch

from gpu_weights import bound
from triptych.kernels.ops import MATMUL
from triptych.kernels.reference import matmul as plain
from triptych.kernels.triton import tiles
from triptych.kernels.triton.matmul import matmul

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    out = torch.full((len(x), len(weight)), torch.nan, dtype=dtype)
    matmul(x, weight, out, bias)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 17, 33, 65, 130])
def test_as_the_truth(dtype: torch.dtype, tokens: int) -> None:
    for outputs, columns in ((70, 200), (64, 64), (1, 40)):
        x, weight = torch.randn(tokens, columns).to(dtype), torch.randn(outputs, columns).to(dtype)
        bias = torch.randn(outputs)
        out = multiply(x, weight, bias, dtype)
        wide_x = torch.cat((x.float(), torch.ones(tokens, 1)), 1)
        wide = torch.cat((weight.float(), bias[:, None]), 1)
        assert torch.all(
            (out - wide_x.double() @ wide.double().T).abs() <= bound(wide_x, wide, out)
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_far_apart(dtype: torch.dtype) -> None:
    far = 10.0 ** torch.randint(-4, 4, (9, 1))
    x, weight = (torch.randn(9, 300) * far).to(dtype), (torch.randn(9, 300) * far).to(dtype)
    x[3] = 0
    out = multiply(x, weight)
    assert torch.all((out - x.double() @ weight.double().T).abs() <= bound(x, weight, out))
    assert torch.all(out[3] == 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_among_any(dtype: torch.dtype) -> None:
    """With one run of columns and with several, apart (few tokens) and in turn (many)."""
    for outputs, columns in ((64, 1024), (80, 200)):
        weight = torch.randn(outputs, columns).to(dtype)
        row = torch.randn(1, columns).to(dtype)
        alone = multiply(row, weight)
        for tokens, at in ((2, 0), (17, 16), (40, 21), (130, 129)):
            others = torch.randn(tokens - 1, columns).to(dtype)
            rows = torch.cat((others[:at], row, others[at:]))
            assert torch.equal(multiply(rows, weight)[at : at + 1], alone)


def test_runs_in_turn_are_as_runs_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(70, 1024).bfloat16(), torch.randn(100, 1024).bfloat16()
    assert tiles.runs_of(100, 1024, 64).count == 4
    apart = multiply(x, weight)
    assert torch.count_nonzero(tiles.kept_workspace(x.device).tickets) == 0
    monkeypatch.setattr(tiles, "_PARTIALS", 0)
    assert torch.equal(multiply(x, weight), apart)


def test_runs_depend_on_the_shape_alone() -> None:
    """And are all there, whatever their number."""
    for outputs in (1, 64, 576, 4096, 128256):
        for columns in (1, 64, 200, 576, 4096, 14336):
            runs = tiles.runs_of(outputs, columns, 64)
            blocks = -(-columns // 64)
            assert runs.blocks * (runs.count - 1) < blocks <= runs.blocks * runs.count
            assert runs.count == 1 or runs.blocks >= 4


def test_strided_rows() -> None:
    weight = torch.randn(40, 96).bfloat16()
    wide = torch.randn(5, 200).bfloat16()
    wide[:, 96:] = torch.nan
    out = torch.full((5, 100), torch.nan)
    matmul(wide[:, :96], weight, out[:, 30:70])
    assert torch.equal(out[:, 30:70], multiply(wide[:, :96].contiguous(), weight))
    assert torch.isnan(out[:, :30]).all()
    assert torch.isnan(out[:, 70:]).all()


def test_a_row_that_is_not_a_number_harms_no_other() -> None:
    x, weight = torch.randn(20, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    expected = multiply(x, weight)
    x[7] = torch.nan
    x[9] = torch.inf
    out = multiply(x, weight)
    assert torch.isnan(out[7]).all()
    assert not torch.isfinite(out[9]).any()
    rest = [row for row in range(20) if row not in (7, 9)]
    assert torch.equal(out[rest], expected[rest])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_twin(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 300).to(dtype), torch.randn(20, 300).to(dtype)
    bias = torch.randn(20).to(dtype)
    out = torch.empty(5, 20, dtype=dtype)
    plain.matmul(x, weight, out, bias)
    alone = torch.empty(1, 20, dtype=dtype)
    plain.matmul(x[2:3], weight, alone, bias)
    assert torch.equal(out[2:3], alone)
    truth = x.double() @ weight.double().T + bias.double()
    allowed = MATMUL.tolerance("float32" if dtype == torch.float32 else "bfloat16")
    ours = multiply(x, weight, bias, dtype)
    for result in (out, ours):
        error = (result - truth).abs()
        assert torch.all(error <= allowed.absolute + allowed.relative * truth.abs())


@pytest.mark.parametrize(
    ("x", "weight", "out"),
    [
        (torch.zeros(1, 65), torch.zeros(8, 64), torch.zeros(1, 8)),
        (torch.zeros(1, 64), torch.zeros(8, 64), torch.zeros(1, 9)),
        (torch.zeros(1, 64), torch.zeros(8, 64).bfloat16(), torch.zeros(1, 8)),
        (torch.zeros(1, 64).double(), torch.zeros(8, 64).double(), torch.zeros(1, 8)),
        (torch.zeros(1, 64), torch.zeros(64, 8).T, torch.zeros(1, 8)),
        (torch.zeros(64, 2).T, torch.zeros(8, 64), torch.zeros(2, 8)),
    ],
)
def test_what_does_not_fit_is_refused(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor
) -> None:
    with pytest.raises(ValueError, match=r"fit|supported|contiguous"):
        matmul(x, weight, out)
