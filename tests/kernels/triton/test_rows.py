"""Norms, gates and embeddings against float64 and the reference, within the ops' tolerances."""

import pytest
import torch

from triptych.kernels.ops import RMS_NORM, SILU_GATE, Tolerance
from triptych.kernels.reference import embedding, rms_norm
from triptych.kernels.triton.embedding import embed
from triptych.kernels.triton.rms_norm import add_rms_norm
from triptych.kernels.triton.silu_gate import gelu_tanh_gate, silu_gate

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def assert_near(got: torch.Tensor, truth: torch.Tensor, bound: Tolerance) -> None:
    torch.testing.assert_close(got.double(), truth, rtol=bound.relative, atol=bound.absolute)


def bound_of(op: object, dtype: torch.dtype) -> Tolerance:
    bound = getattr(op, "float32" if dtype == torch.float32 else "bfloat16")
    assert isinstance(bound, Tolerance)
    return bound


@DTYPES
@pytest.mark.parametrize("shape", [(1, 1), (3, 33), (2, 576), (0, 8)])
def test_norm_of_the_residual_stream(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual = (torch.randn(shape) * 3).to(dtype), torch.randn(shape).to(dtype)
    weight, out = torch.randn(shape[1]), torch.empty(shape, dtype=dtype)
    total = residual.clone()
    plain = rms_norm.add_rms_norm(x, total, weight, 1e-5)
    add_rms_norm(x, residual, weight, 1e-5, out)
    assert torch.equal(residual, total)
    wide = total.double()
    truth = wide * (wide.square().mean(1, keepdim=True) + 1e-5).rsqrt() * weight
    assert_near(out, truth, bound_of(RMS_NORM, dtype))
    assert_near(plain, truth, bound_of(RMS_NORM, dtype))


@DTYPES
def test_norm_alone_and_of_rows_apart(dtype: torch.dtype) -> None:
    x, weight = torch.randn(4, 100).to(dtype)[:, :48], torch.randn(48)
    out = torch.empty(4, 48, dtype=dtype)
    add_rms_norm(x, None, weight, 1e-6, out)
    wide = x.double()
    truth = wide * (wide.square().mean(1, keepdim=True) + 1e-6).rsqrt() * weight
    assert_near(out, truth, bound_of(RMS_NORM, dtype))


def test_a_row_is_normed_alike_in_any_company() -> None:
    x, weight = torch.randn(5, 77), torch.randn(77)
    together, alone = torch.empty(5, 77), torch.empty(1, 77)
    add_rms_norm(x, None, weight, 1e-5, together)
    add_rms_norm(x[3:4], None, weight, 1e-5, alone)
    assert torch.equal(together[3], alone[0])


def test_a_row_too_long_is_refused() -> None:
    x = torch.empty(1, 32769)
    with pytest.raises(ValueError, match="32769"):
        add_rms_norm(x, None, x[0], 1e-5, x)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 1), (3, 33), (2, 1025), (0, 8)])
@pytest.mark.parametrize("gelu", [False, True])
def test_gates(gelu: bool, shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = (torch.randn(shape[0], 2 * shape[1]) * 4).to(dtype)
    if shape[0] > 1:
        gate_up[0, 0], gate_up[1, 0] = 100.0, -100.0
    out = torch.empty(shape, dtype=dtype)
    (gelu_tanh_gate if gelu else silu_gate)(gate_up, out)
    gate, up = gate_up.double().chunk(2, dim=1)
    active = torch.nn.functional.gelu(gate, approximate="tanh") if gelu else gate * gate.sigmoid()
    assert_near(out, active * up, bound_of(SILU_GATE, dtype))


@DTYPES
def test_embeddings_of_a_part_of_the_vocabulary(dtype: torch.dtype) -> None:
    table, out = torch.randn(6, 70).to(dtype), torch.full((5, 70), 9.0, dtype=dtype)
    embed(torch.tensor([3, 8, 9, 2, 4], dtype=torch.int32), table, 3, out)
    zeros = torch.zeros_like(table[0])
    assert torch.equal(out, torch.stack([table[0], table[5], zeros, zeros, table[1]]))
    assert torch.equal(out, embedding.embed(torch.tensor([3, 8, 9, 2, 4]), table, 3))
