"""NCCL's calls as GroupCollectives makes them, eager and captured: with one rank, all one GPU has.

Sums over ranks are tested with gloo (tests/integration/test_rank_groups.py): the same code.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from triptych.services.executor.device.group_collectives import GroupCollectives, open_nccl
from triptych.services.executor.rank_group import RankGroup
from triptych.services.runtime.run_dir import RunDir

DEVICE = torch.device("cuda", 0)


@pytest.fixture(params=[False, True], ids=["any order", "rank order"])
def collectives(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[GroupCollectives]:
    torch.cuda.set_device(DEVICE)
    run_dir = RunDir.open(tmp_path / "run")
    group = RankGroup(run_dir, "executor-0", (0, 1), "executor-group-0.meeting", {})
    found = open_nccl(group, DEVICE, deterministic=request.param)
    found._in_order = request.param  # what three ranks would do
    found.reserve(1 << 16)
    yield found
    group.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_calls_can_be_captured(collectives: GroupCollectives, dtype: torch.dtype) -> None:
    value = torch.randn(5, 64, device=DEVICE).to(dtype)
    tensor, out = torch.zeros_like(value), torch.zeros(5, 60, dtype=dtype, device=DEVICE)
    tokens = torch.arange(7, dtype=torch.int32, device=DEVICE)

    def work() -> None:
        collectives.all_reduce(tensor)
        collectives.gather_columns(tensor, out)
        collectives.broadcast(tokens)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        work()
    tensor.copy_(value)
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(tensor, value)
    assert torch.equal(out, value[:, :60])
    assert tokens.tolist() == list(range(7))


def test_minimum(collectives: GroupCollectives) -> None:
    assert collectives.minimum((3, 5)) == (3, 5)
