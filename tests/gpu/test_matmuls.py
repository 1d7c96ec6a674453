"""Products at real sizes: a row's bits do not depend on how many there are, whatever tile computes
it, and graphs may be replayed for ever."""

from collections.abc import Callable

import pytest
import torch

from gpu_weights import bound, random_float8_weight, random_int_weight
from triptych.kernels.reference.quantized_weights import QuantizedWeight
from triptych.kernels.reference.w8a8_matmul import ByteWeight, padded_columns

TOKENS = (1, 2, 15, 16, 17, 32, 33, 64, 65, 128, 129, 256, 300, 1024, 2048)
SHAPES = ((4096, 4096), (6144, 2048), (20480, 1024), (192, 576))
Multiply = Callable[[torch.Tensor, torch.Tensor], None]


def dense(outputs: int, columns: int) -> tuple[torch.Tensor, Multiply]:
    from triptych.kernels.triton.matmul import matmul

    weight = torch.randn(outputs, columns, device="cuda").bfloat16()
    return weight.float(), lambda x, out: matmul(x, weight, out)


def quantized(kind: str, outputs: int, columns: int) -> tuple[torch.Tensor, Multiply]:
    from triptych.kernels.triton.quantized_matmul import quantized_matmul

    made: QuantizedWeight
    if kind == "fp8":
        made = random_float8_weight(0, outputs, columns)
    elif kind == "int8":
        made = random_int_weight(8, 0, outputs, columns, zeros=False)
    else:
        group = 32 if columns % 128 else 128
        made = random_int_weight(4, group, outputs, columns, zeros=True)
    weight = made.to(torch.device("cuda"))
    return weight.values(), lambda x, out: quantized_matmul(x, weight, out)


def bytes_by_bytes(kind: str, outputs: int, columns: int) -> tuple[torch.Tensor, Multiply]:
    from triptych.kernels.triton.w8a8_matmul import quantize_tokens, w8a8_matmul

    weight: ByteWeight
    if kind == "w8a8 fp8":
        weight = random_float8_weight(0, outputs, columns).to(torch.device("cuda"))
    else:
        integers = random_int_weight(8, 0, outputs, columns, zeros=False)
        weight = integers.to(torch.device("cuda"))
    dtype = torch.float8_e4m3fn if kind == "w8a8 fp8" else torch.int8

    def multiply(x: torch.Tensor, out: torch.Tensor) -> None:
        codes = torch.empty(len(x), padded_columns(weight), dtype=dtype, device="cuda")
        scales = torch.empty(len(x), device="cuda")
        quantize_tokens(x, codes, scales)
        w8a8_matmul(codes, scales, weight, out)

    return weight.values(), multiply


KINDS = ("bf16", "int4", "int8", "fp8", "w8a8 int8", "w8a8 fp8")


def made(kind: str, outputs: int, columns: int) -> tuple[torch.Tensor, Multiply]:
    if kind == "bf16":
        return dense(outputs, columns)
    return (bytes_by_bytes if "w8a8" in kind else quantized)(kind, outputs, columns)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "columns"), SHAPES)
def test_a_row_is_the_same_among_any(kind: str, outputs: int, columns: int) -> None:
    values, multiply = made(kind, outputs, columns)
    x = torch.randn(max(TOKENS), columns, device="cuda").bfloat16()
    alone = torch.empty(1, outputs, device="cuda")
    multiply(x[:1], alone)
    if "w8a8" not in kind:
        assert torch.all(
            (alone - x[:1].double() @ values.double().T).abs() <= bound(x[:1], values, alone)
        )
    different = []
    for tokens in TOKENS:
        out = torch.full((tokens, outputs), torch.nan, device="cuda")
        multiply(torch.cat((x[1:tokens], x[:1])), out)
        if not torch.equal(out[-1:], alone):
            different.append(tokens)
    assert not different


def test_a_graph_leaves_its_tickets_as_they_were() -> None:
    """Runs apart hand out tickets: a replay must find them as the first launch did."""
    from triptych.kernels.triton.tiles import kept_workspace

    _, multiply = dense(4096, 4096)
    x = torch.randn(1, 4096, device="cuda").bfloat16()
    expected, out = (torch.empty(1, 4096, device="cuda") for _ in range(2))
    multiply(x, expected)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            multiply(x, out)
    for _ in range(200):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)
    assert torch.count_nonzero(kept_workspace(x.device).tickets) == 0
