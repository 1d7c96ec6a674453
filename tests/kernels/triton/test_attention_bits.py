"""A token's attention has the same bits however it is computed: decoded or prefilled, whatever
else is, wherever its blocks are and however its prompt was cut."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from attention_cases import Case, Shape, make_case
from triptych.kernels.triton.paged_attention import (
    decode_attention,
    decode_workspace,
    prefill_attention,
)

torch.set_num_threads(1)

LENGTH = 330


def step(case: Case, rows: list[tuple[int, int]], source: torch.Tensor) -> torch.Tensor:
    """Prefill rows (queries, tokens), all of the case's one sequence; source: its queries."""
    shape = case.shape
    q = torch.cat([source[length - count : length] for count, length in rows])
    starts = torch.tensor([0, *(count for count, _ in rows)]).cumsum(0).to(torch.int32)
    out = torch.empty_like(q)
    prefill_attention(
        q, case.k_cache, case.v_cache, starts,
        torch.tensor([length for _, length in rows], dtype=torch.int32),
        case.block_tables.expand(len(rows), -1), out, shape.scale, shape.window, shape.cap,
        case.scales,
    )  # fmt: skip
    return out


@pytest.mark.parametrize(
    "shape",
    [
        Shape(dtype=torch.bfloat16),
        Shape(heads=3, dtype=torch.bfloat16, window=100),
        Shape(heads=2, kv_heads=2, dtype=torch.float32),
        Shape(heads=1, dtype=torch.float16, cache=torch.int8, cap=2.0),
    ],
    ids=repr,
)
def test_same_bits(shape: Shape) -> None:
    case = make_case(shape, [(LENGTH, LENGTH)])
    whole = step(case, [(LENGTH, LENGTH)], case.q)

    cuts = [0, *sorted(torch.randint(1, LENGTH, (2,)).tolist()), LENGTH]
    chunks = [(end - start, end) for start, end in pairwise(cuts) if end > start]
    assert torch.equal(step(case, chunks, case.q), whole)
    assert torch.equal(step(case, chunks[-1:], case.q), whole[cuts[-2] :])

    # Some tokens are decoded, in one batch with padding, and alone.
    lengths = torch.tensor([LENGTH, 0, 64, 257, int(torch.randint(1, LENGTH, ()))])
    places = (lengths - 1).clamp(min=0)
    q = case.q[places].clone()
    q[1] = torch.nan
    tables = case.block_tables.expand(5, -1)
    assert torch.equal(decoded(case, q, tables, lengths)[lengths > 0], whole[places[lengths > 0]])
    assert torch.equal(decoded(case, q[3:4], tables[:1], lengths[3:4]), whole[256:257])


def decoded(
    case: Case, q: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    shape = case.shape
    out = torch.empty_like(q)
    workspace = torch.empty(decode_workspace(len(q), shape.heads, shape.head_dim, 512))
    decode_attention(
        q, case.k_cache, case.v_cache, tables, lengths.to(torch.int32), out, workspace,
        shape.scale, shape.window, shape.cap, case.scales,
    )  # fmt: skip
    return out


def test_blocks_elsewhere() -> None:
    """The same numbers in other blocks, and blocks of another size."""
    case = make_case(Shape(dtype=torch.bfloat16), [(1, 300)])
    expected = decoded(case, case.q, case.block_tables, case.kv_lengths)
    used = case.block_tables[0, :19].long()
    order = torch.randperm(len(case.k_cache))
    back = torch.argsort(order).to(torch.int32)
    moved = replace(case, k_cache=case.k_cache[order], v_cache=case.v_cache[order])
    tables = case.block_tables.clone()
    tables[0, :19] = back[used]
    assert torch.equal(decoded(moved, case.q, tables, case.kv_lengths), expected)

    double = [
        cache[case.block_tables[0, :18].long()].reshape(9, 32, 1, 64)
        for cache in (case.k_cache, case.v_cache)
    ]
    last = [
        torch.cat((cache[used[18]], cache[used[18]])).unsqueeze(0)
        for cache in (case.k_cache, case.v_cache)
    ]
    larger = replace(
        case, k_cache=torch.cat((double[0], last[0])), v_cache=torch.cat((double[1], last[1]))
    )
    tables = torch.arange(16, dtype=torch.int32).unsqueeze(0)
    assert torch.equal(decoded(larger, case.q, tables, case.kv_lengths), expected)
