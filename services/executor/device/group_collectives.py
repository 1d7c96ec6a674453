"""Collectives of torch's process groups: gloo between processes of one CPU, NCCL between GPUs.

gloo and NCCL cut a tensor into pieces, and begin the sum of each with another rank: what a number's
last bits are would depend on what else is summed with it. Where that must not be, the ranks' parts
are collected and summed in order. (Of two numbers there is one sum only.)
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    BroadcastOptions,
    FileStore,
    GatherOptions,
    ReduceOp,
)

from triptych.services.executor.device.emulated_trace import kernel
from triptych.services.executor.device.opening import why_no_cuda
from triptych.services.executor.rank_group import RankGroup
from triptych.services.runtime.lifecycle import StartupError

_FOR_EVER = timedelta(days=365)
"""A hang is for step_timeout to end, and the end of a peer is seen by its connection."""
_FILE_SECONDS = timedelta(seconds=300)
_LOOPBACK = "127.0.0.1"


class _Work(Protocol):
    def wait(self) -> bool: ...


class _Group(Protocol):
    """What is used of torch's process groups."""

    def allreduce(self, tensors: list[torch.Tensor], opts: AllreduceOptions) -> _Work: ...
    def broadcast(self, tensors: list[torch.Tensor], opts: BroadcastOptions) -> _Work: ...
    def allgather(
        self,
        output_tensors: list[list[torch.Tensor]],
        input_tensors: list[torch.Tensor],
        opts: AllgatherOptions,
    ) -> _Work: ...
    def gather(
        self,
        output_tensors: list[list[torch.Tensor]],
        input_tensors: list[torch.Tensor],
        opts: GatherOptions,
    ) -> _Work: ...


class GroupCollectives:
    """Fills `Collectives`. Used by one thread at a time."""

    def __init__(
        self, group: RankGroup, ranks: _Group, device: torch.device, *, in_order: bool
    ) -> None:
        """`ranks`: the process group of `group`'s ranks, for tensors on `device`. `in_order`: sums
        must not depend on what else is summed."""
        self._group = group
        self._ranks = ranks
        self._device = device
        self._in_order = in_order and group.size > 2
        self._workspace = torch.empty(0, dtype=torch.uint8, device=device)

    @property
    def rank(self) -> int:
        """0 to size - 1."""
        return self._group.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._group.size

    def reserve(self, num_bytes: int) -> None:
        """Room for every rank's tensor of so many bytes."""
        if len(self._workspace) < self.size * num_bytes:
            self._workspace = torch.empty(
                self.size * num_bytes, dtype=torch.uint8, device=self._device
            )

    @kernel
    def all_reduce(self, tensor: torch.Tensor) -> None:
        """The sum over ranks, in place."""
        if not tensor.numel():
            return
        with self._ending_if_it_fails():
            if not self._in_order:
                self._ranks.allreduce([tensor], AllreduceOptions()).wait()
                return
            parts = self._parts(tensor)
            self._ranks.allgather([parts], [tensor], AllgatherOptions()).wait()
        total = parts[0].float()
        for part in parts[1:]:
            total += part.float()
        tensor.copy_(total)

    @kernel
    def gather_columns(self, part: torch.Tensor, out: torch.Tensor | None) -> None:
        """Columns of all ranks, side by side on rank 0."""
        if not part.numel():
            return
        options = GatherOptions()
        options.rootRank = 0
        parts = self._parts(part) if out is not None else []
        with self._ending_if_it_fails():
            self._ranks.gather([parts] if out is not None else [], [part], options).wait()
        if out is None:
            return
        first = 0
        for columns in parts:
            last = min(first + columns.shape[1], out.shape[1])
            out[:, first:last].copy_(columns[:, : last - first])
            first = last

    @kernel
    def broadcast(self, tensor: torch.Tensor) -> None:
        """Rank 0's, in place."""
        if not tensor.numel():
            return
        options = BroadcastOptions()
        options.rootRank = 0
        with self._ending_if_it_fails():
            self._ranks.broadcast([tensor], options).wait()

    def minimum(self, values: Sequence[int]) -> tuple[int, ...]:
        """The least of each over ranks."""
        least = torch.tensor(values, dtype=torch.int64, device=self._device)
        options = AllreduceOptions()
        options.reduceOp = ReduceOp(ReduceOp.MIN)
        with self._ending_if_it_fails():
            self._ranks.allreduce([least], options).wait()
        return tuple(int(value) for value in least.tolist())

    def _parts(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Room for every rank's tensor of this shape."""
        num_bytes = tensor.numel() * tensor.element_size()
        self.reserve(num_bytes)
        whole = self._workspace[: self.size * num_bytes].view(tensor.dtype)
        return list(whole.view(self.size, *tensor.shape).unbind(0))

    @contextmanager
    def _ending_if_it_fails(self) -> Iterator[None]:
        """Nobody knows what the others have computed then, and a step that failed here alone must
        not be told of: this process ends."""
        try:
            yield
        except RuntimeError as error:
            self._group.fail(f"a collective failed: {error}")


def open_collectives(group: RankGroup, kind: str, *, deterministic: bool) -> GroupCollectives:
    """Collectives of the ranks' devices, of that kind. Raises StartupError where a GPU cannot be
    used; ends the process when the ranks do not meet."""
    if kind != "cuda":
        return open_gloo(group)
    reason = why_no_cuda(group.rank, group.size)
    if reason is not None:
        raise StartupError(f"device {kind}: {reason}")
    device = torch.device("cuda", group.rank)
    torch.cuda.set_device(device)
    return open_nccl(group, device, deterministic=deterministic)


def open_gloo(group: RankGroup) -> GroupCollectives:
    """Collectives of CPU tensors. All ranks call it; ends the process when they do not meet."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in the stubs
    # By default it listens where the machine's name leads, if that leads anywhere.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
    options._timeout = _FOR_EVER
    try:
        ranks = dist.ProcessGroupGloo(_store(group), group.rank, group.size, options)
    except RuntimeError as error:
        group.fail(f"the ranks do not meet: {error}")
    return GroupCollectives(group, cast(_Group, ranks), torch.device("cpu"), in_order=True)


def open_nccl(group: RankGroup, device: torch.device, *, deterministic: bool) -> GroupCollectives:
    """Collectives of a GPU's tensors, as `open_gloo`. `device`: the current one."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _FOR_EVER
    try:
        ranks = dist.ProcessGroupNCCL(_store(group), group.rank, group.size, options)
        ranks.eager_connect_single_device(device)  # a failure belongs here, and so does its memory
    except RuntimeError as error:
        group.fail(f"the ranks do not meet: {error}")
    return GroupCollectives(group, cast(_Group, ranks), device, in_order=deterministic)


def _store(group: RankGroup) -> FileStore:
    store = FileStore(str(group.meeting), group.size)
    store.set_timeout(_FILE_SECONDS)
    return store
