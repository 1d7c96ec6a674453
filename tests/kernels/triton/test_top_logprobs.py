"""The device's logprobs are the host's."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from sampler_cases import random_logits
from triptych.kernels.reference.sampler import Sampler
from triptych.kernels.triton.top_logprobs import logprobs_workspace, top_logprobs

TOP = 5


@dataclass(frozen=True)
class Columns:
    rows: torch.Tensor
    params: torch.Tensor
    history_starts: torch.Tensor
    history_prompts: torch.Tensor
    history: torch.Tensor


@dataclass(frozen=True)
class Out:
    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_counts: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor


def columns(rows: list[int], asked: list[int]) -> Columns:
    params = torch.zeros(len(rows), 12, dtype=torch.int32)
    params[:, 11] = torch.tensor(asked, dtype=torch.int32)
    none = torch.zeros(0, dtype=torch.int32)
    return Columns(torch.tensor(rows, dtype=torch.int32), params, none, none, none)


@pytest.mark.parametrize("vocabulary", [3, 64, 65, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_the_host(vocabulary: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(vocabulary)
    samples = 8
    logits = torch.tensor(random_logits(rng, 4, vocabulary + 1)).to(dtype)
    logits[0, : vocabulary // 2] = -torch.inf
    logits[1] -= 50
    rows = [*rng.integers(0, 4, samples - 1).tolist(), -1]
    asked = [0, 1, 3, TOP, TOP, -1, 2, TOP]
    tokens = [*rng.integers(0, vocabulary, samples).tolist()]
    tokens[4] = -1
    size, marks = (samples,), -99
    out = Out(
        torch.full(size, marks, dtype=torch.float32),
        torch.full(size, marks, dtype=torch.int32),
        torch.full(size, marks, dtype=torch.int32),
        torch.full((samples, TOP), marks, dtype=torch.int32),
        torch.full((samples, TOP), marks, dtype=torch.float32),
    )
    room = logprobs_workspace(samples, vocabulary, TOP, torch.get_default_device(), piece=64)
    ids = torch.tensor(tokens, dtype=torch.int32)
    top_logprobs(logits, columns(rows, asked), vocabulary, ids, out, room)
    out = Out(*(each.cpu() for each in vars(out).values()))
    host, wide = Sampler(vocabulary), logits.to(torch.float32).cpu().numpy()
    for s in range(samples):
        if rows[s] < 0 or asked[s] < 0 or tokens[s] < 0:
            assert out.logprobs[s] == marks
            assert out.top_counts[s] == marks
            continue
        (expected,) = host.score(wide, [rows[s]], [tokens[s]], asked[s])
        assert expected is not None
        count = len(expected.top_ids)
        assert out.top_counts[s] == count
        assert out.top_ids[s, :count].tolist() == expected.top_ids.tolist()
        assert out.top_ids[s, count:].eq(marks).all()
        np.testing.assert_allclose(out.top_logprobs[s, :count], expected.top_logprobs, rtol=3e-7)
        np.testing.assert_allclose(out.logprobs[s], expected.logprob, rtol=3e-7)
        assert out.ranks[s] == expected.rank


def test_more_than_there_is_room_for_is_refused() -> None:
    with pytest.raises(ValueError, match="top 33 is not within 1 and 32"):
        logprobs_workspace(1, 10, 33, "cpu")
