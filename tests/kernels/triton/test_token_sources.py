"""Ids of tokens that the step before drew."""

import sys

import pytest
import torch

from triptych.kernels.reference import token_sources as plain
from triptych.kernels.triton.token_sources import resolve_tokens


def test_the_interpreter_runs_this() -> None:
    """What the folder's conftest is for."""
    if torch.get_default_device().type == "cpu":
        assert "triton.runtime.interpreter" in sys.modules


def test_ids_are_replaced_and_others_stay() -> None:
    ids = torch.tensor([5, -2, -1, -4, 0, -3, -5], dtype=torch.int32)
    resolve_tokens(ids, torch.tensor([70, 71, -1], dtype=torch.int32))
    assert ids.tolist() == [5, 70, -1, 0, 0, 71, -5]


@pytest.mark.parametrize(("tokens", "samples"), [(0, 0), (0, 3), (1, 1), (255, 9), (257, 300)])
def test_as_the_reference(tokens: int, samples: int) -> None:
    ids = torch.randint(-3 - samples, 9, (tokens,), dtype=torch.int32)
    previous = torch.randint(-1, 50, (samples,), dtype=torch.int32)
    expected = ids.clone()
    plain.resolve_tokens(expected, previous)
    resolve_tokens(ids, previous)
    assert torch.equal(ids, expected)
