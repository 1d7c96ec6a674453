"""What ranks that compute a step together ask of one another, without saying how it travels.

A rank is a process with a device of its own and a part of the weights. Every rank makes the same
calls in the same order. Torch is only known here to type checkers: one rank alone needs none of it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Collectives(Protocol):
    """Sums and copies across ranks.

    Calls on tensors are queued on the device's current stream, and may be captured in a graph, or
    are done when they return where the device is the CPU. None of them ever raises for a peer that
    is gone: the process ends then (see rank_group).
    """

    @property
    def rank(self) -> int:
        """0 to size - 1."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def reserve(self, num_bytes: int) -> None:
        """Make room for tensors of up to so many bytes a rank. To be called before a call is
        captured in a graph, which will not follow memory that moves."""

    def all_reduce(self, tensor: "torch.Tensor") -> None:
        """Replace a contiguous tensor by its sum over ranks. All ranks then hold the same bits."""

    def gather_columns(self, part: "torch.Tensor", out: "torch.Tensor | None") -> None:
        """Put columns together on rank 0: part [T, C] of every rank, contiguous, into rank 0's
        out [T, V] with V <= size * C: the last ranks' columns, from V on, are padding
        that is dropped. Other ranks pass None."""

    def broadcast(self, tensor: "torch.Tensor") -> None:
        """Replace a contiguous tensor by rank 0's."""

    def minimum(self, values: Sequence[int]) -> tuple[int, ...]:
        """The least of each of these numbers over ranks; waits for all. At opening only."""


class Alone:
    """The one rank of an executor that computes by itself."""

    rank = 0
    size = 1

    def reserve(self, num_bytes: int) -> None:
        """Nothing is kept."""

    def all_reduce(self, tensor: "torch.Tensor") -> None:
        """It is its own sum."""

    def gather_columns(self, part: "torch.Tensor", out: "torch.Tensor | None") -> None:
        """The part is all there is."""
        if out is not None:
            out.copy_(part[:, : out.shape[1]])

    def broadcast(self, tensor: "torch.Tensor") -> None:
        """It is rank 0's."""

    def minimum(self, values: Sequence[int]) -> tuple[int, ...]:
        """As they are."""
        return tuple(values)


ALONE = Alone()
