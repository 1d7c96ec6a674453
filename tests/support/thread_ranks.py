"""Ranks of a tensor-parallel group as threads of one process: their devices' streams meet here."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from triptych.services.executor.device.emulated_trace import kernel

Result = TypeVar("Result")
_SECONDS = 60.0


class Meeting:
    """What the ranks share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=_SECONDS)
        self.places: list[object] = [None] * size

    def exchanged(self, rank: int, value: object) -> list[object]:
        """Every rank's value, in order."""
        self.places[rank] = value
        self.barrier.wait()
        values = list(self.places)
        self.barrier.wait()
        return values


class ThreadRank:
    """As `Collectives`, for rank `rank`."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self.rank = rank
        self.size = meeting.size

    def reserve(self, num_bytes: int) -> None:
        """Nothing is kept."""

    @kernel
    def all_reduce(self, tensor: torch.Tensor) -> None:
        """As `Collectives.all_reduce`."""
        parts = self._tensors(tensor.clone())
        total = parts[0].to(torch.float32)
        for part in parts[1:]:
            total = total + part.to(torch.float32)
        tensor.copy_(total)

    @kernel
    def gather_columns(self, part: torch.Tensor, out: torch.Tensor | None) -> None:
        """As `Collectives.gather_columns`."""
        parts = self._tensors(part.clone())
        if out is not None:
            out.copy_(torch.cat(parts, dim=1)[:, : out.shape[1]])

    @kernel
    def broadcast(self, tensor: torch.Tensor) -> None:
        """As `Collectives.broadcast`."""
        tensor.copy_(self._tensors(tensor.clone())[0])

    def minimum(self, values: Sequence[int]) -> tuple[int, ...]:
        """As `Collectives.minimum`."""
        everybody = self._meeting.exchanged(self.rank, tuple(values))
        assert all(isinstance(each, tuple) for each in everybody)
        return tuple(min(column) for column in zip(*everybody, strict=True))

    def _tensors(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        everybody = self._meeting.exchanged(self.rank, tensor)
        return [each for each in everybody if isinstance(each, torch.Tensor)]


def on_all_ranks(size: int, work: Callable[[ThreadRank], Result]) -> list[Result]:
    """The work of each rank, at the same time."""
    meeting = Meeting(size)
    ranks = [ThreadRank(meeting, rank) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, ranks))
