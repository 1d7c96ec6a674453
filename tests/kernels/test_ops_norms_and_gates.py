"""rms_norm, layer_norm, rotary, silu_gate: reference against float64, within the op's tolerance."""

from collections.abc import Callable

import pytest
import torch

from triptych.kernels.ops import LAYER_NORM, OPS, RMS_NORM, ROTARY, SILU_GATE, Dtype, Op
from triptych.kernels.reference.layer_norm import layer_norm
from triptych.kernels.reference.rms_norm import rms_norm
from triptych.kernels.reference.rotary import rotary
from triptych.kernels.reference.silu_gate import silu_gate

torch.set_num_threads(1)  # the suite shares its cores

DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
# Awkward: one element, odd, above a vector register, empty batch.
SHAPES = ((1, 1), (3, 7), (5, 576), (0, 64))


def check(op: Op, dtype: Dtype, got: torch.Tensor, truth: torch.Tensor) -> None:
    bound = op.tolerance(dtype)
    assert got.dtype == getattr(torch, dtype)
    assert got.shape == truth.shape
    allowed = bound.absolute + bound.relative * truth.abs()
    assert ((got.double() - truth).abs() <= allowed).all()


def random(*shape: int, scale: float = 1.0, dtype: Dtype = "float32") -> torch.Tensor:
    torch.manual_seed(sum(shape))
    return (torch.randn(shape) * scale).to(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_rms_norm(dtype: Dtype, shape: tuple[int, int], scale: float) -> None:
    x, weight = random(*shape, scale=scale, dtype=dtype), random(shape[1])
    wide = x.double()
    truth = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    check(RMS_NORM, dtype, rms_norm(x, weight, 1e-5), truth)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_layer_norm(dtype: Dtype, shape: tuple[int, int]) -> None:
    x = random(*shape, scale=3.0, dtype=dtype)
    weight, bias = random(shape[1]), random(shape[1]) + 1
    wide = x.double()
    truth = torch.nn.functional.layer_norm(wide, (shape[1],), weight.double(), bias.double(), 1e-5)
    check(LAYER_NORM, dtype, layer_norm(x, weight, bias, 1e-5), truth)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 2), (7, 3, 6), (5, 9, 64), (0, 2, 8)])
def test_rotary(dtype: Dtype, shape: tuple[int, int, int]) -> None:
    x = random(*shape, dtype=dtype)
    angles = random(shape[0], shape[2] // 2, scale=50.0)
    cos, sin = angles.cos(), angles.sin()
    half = shape[2] // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    turned = pairs * torch.complex(cos.double(), sin.double()).unsqueeze(1)
    check(ROTARY, dtype, rotary(x, cos, sin), torch.cat((turned.real, turned.imag), -1))


def test_rotary_keeps_lengths_and_depends_on_distance_only() -> None:
    frequencies = 10000.0 ** (-torch.arange(0, 8, dtype=torch.float32) / 8)
    q, k = random(1, 1, 16), random(1, 1, 16) + 1

    def product(at: float, distance: float) -> float:
        angles = torch.stack((frequencies * at, frequencies * (at + distance)))
        turned = rotary(torch.cat((q, k)), angles.cos(), angles.sin())
        assert torch.allclose(turned[0].norm(), q.norm())
        return float((turned[0] * turned[1]).sum())

    assert product(0, 5) == pytest.approx(product(90, 5), abs=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 14), (5, 512), (0, 8)])
def test_silu_gate(dtype: Dtype, shape: tuple[int, int]) -> None:
    x = random(*shape, scale=5.0, dtype=dtype)
    gate, up = x.double().chunk(2, -1)
    check(SILU_GATE, dtype, silu_gate(x), gate / (1 + (-gate).exp()) * up)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: rms_norm(x, torch.ones(4), 1e-5),
        lambda x: layer_norm(x, torch.ones(4), torch.zeros(4), 1e-5),
        silu_gate,
    ],
)
def test_nan_is_not_hidden(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.ones(2, 4)
    x[0] = float("nan")
    out = call(x)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


def test_contracts_are_named_as_their_files() -> None:
    for name, op in OPS.items():
        assert op.name == name
        __import__(f"triptych.kernels.reference.{name}")
