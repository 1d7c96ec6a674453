"""Which sequences are split along their keys, and what is done without room, keys or tokens."""

from dataclasses import replace

import pytest
import torch

from attention_cases import Shape, make_case, truth
from attention_launches import decoded, near, prefilled
from triptych.kernels.triton import attention_call
from triptych.kernels.triton.attention_forms import AttentionTiles, Tiles
from triptych.kernels.triton.paged_attention import decode_workspace

torch.set_num_threads(1)


def test_padded_rows() -> None:
    """Length 0: zeros from decode, nothing from prefill; nothing of them is read."""
    case = make_case(Shape(), [(0, 0), (2, 20), (0, 0), (1, 5), (0, 0)])
    expected = truth(case)
    q = torch.full((5, 4, 64), torch.nan)
    q[1], q[3] = case.q[1], case.q[2]
    padded = replace(case, q=q, row_starts=torch.arange(6, dtype=torch.int32))
    out = decoded(padded)
    assert near(out[[1, 3]], expected[[1, 2]])
    assert (out[[0, 2, 4]] == 0).all()
    longer = replace(case, q=torch.cat((case.q, torch.full((4, 4, 64), torch.nan))))
    out = prefilled(longer)
    assert near(out[:3], expected)
    assert (out[3:] == 7).all()


def test_nothing_to_do() -> None:
    case = make_case(Shape(), [])
    assert prefilled(case).shape == decoded(case).shape == (0, 4, 64)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("results", [1, 5, 300])
def test_few_queries_are_split(results: int, window: int | None) -> None:
    """With the same bits; as many as find room."""
    shape = Shape(heads=4, head_dim=16, window=window)
    rows = [(1, 300), (17, 30), (0, 9), (16, 270), (2, 2), (0, 0), (3, 257)]
    case = make_case(shape, rows)
    case = replace(case, q=torch.cat((case.q, torch.full((2, 4, 16), torch.nan))))
    whole = prefilled(case)
    assert near(whole[:-2], truth(case)[:-2])
    split = prefilled(case, torch.full((results * 4 * 18,), torch.nan))
    assert torch.equal(split, whole)
    assert (split[-2:] == 7).all()


def test_many_rows() -> None:
    shape = Shape(heads=1, head_dim=16)
    case = make_case(shape, [(1, 1 + row % 3) for row in range(130)])
    assert near(prefilled(case), truth(case))
    case = make_case(shape, [(1, 1 + row % 3) for row in range(17)])
    assert near(decoded(case), truth(case))


@pytest.mark.parametrize(("items", "window"), [(1, None), (3, None), (4, None), (2, 40)])
def test_little_workspace(items: int, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that find no room are computed all the same, with the same bits; in slices of heads."""
    few = Tiles(2, 64, 1, 1)
    monkeypatch.setattr(attention_call, "attention_tiles", lambda *_: AttentionTiles(few, few, 1))
    case = make_case(Shape(heads=3, head_dim=16, window=window), [(1, 300), (1, 7), (1, 280)])
    whole = decoded(case)
    assert near(whole, truth(case))
    assert torch.equal(decoded(case, 4 * items * 3 * 18), whole)


def test_workspace_is_bounded() -> None:
    assert decode_workspace(2, 32, 128, 1000) == 2 * 4 * 32 * 130
    most = decode_workspace(4096, 32, 128, 1 << 20)
    assert (256 << 20) - 4 * 32 * 130 < 4 * most <= 256 << 20
    assert decode_workspace(1, 4, 64, 256, max_bytes=1) == 4 * 66
