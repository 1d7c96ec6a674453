"""What the sampler needs to know of each row besides its logits, as columns.

Shared by both samplers (`kernels.cpu.sampler`, `kernels.reference.sampler`). Knows nothing of
requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

SampleTuple = tuple[float, int, float, float, int, int, int, tuple[int, ...]]
"""One row's values: temperature, top_k, top_p, min_p, seed, choice, position, banned ids."""


@dataclass(frozen=True, slots=True, eq=False)
class SampleColumns:
    """Entry i of a column belongs to row i of the logits. All columns are C-contiguous.

    temperature float32[n]      0 is greedy
    top_k       int32[n]        0 and -1: off; above the vocabulary: clamped
    top_p       float32[n]      1: off
    min_p       float32[n]      0: off
    seed, choice, position      uint64[n], uint32[n], uint32[n]: key the noise
    banned_ids  int32[m]        never sampled: row i's lie at banned_starts[i] .. [i + 1]
    banned_starts int32[n + 1]

    Raises TypeError for a wrong dtype; ValueError for a wrong shape, a temperature that is negative
    or not finite, and a top_p or min_p outside 0..1. Bad columns are the caller's bug, not a
    client's.
    """

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int32]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    seed: NDArray[np.uint64]
    choice: NDArray[np.uint32]
    position: NDArray[np.uint32]
    banned_ids: NDArray[np.int32]
    banned_starts: NDArray[np.int32]

    def __post_init__(self) -> None:
        rows = len(self.temperature)
        _check("temperature", self.temperature, np.float32, rows)
        _check("top_k", self.top_k, np.int32, rows)
        _check("top_p", self.top_p, np.float32, rows)
        _check("min_p", self.min_p, np.float32, rows)
        _check("seed", self.seed, np.uint64, rows)
        _check("choice", self.choice, np.uint32, rows)
        _check("position", self.position, np.uint32, rows)
        _check("banned_ids", self.banned_ids, np.int32, len(self.banned_ids))
        _check("banned_starts", self.banned_starts, np.int32, rows + 1)
        # Written so that NaN fails: every comparison with NaN is false.
        if not ((self.temperature >= 0) & (self.temperature < np.inf)).all():
            raise ValueError("temperature is negative or not finite")
        for name, column in (("top_p", self.top_p), ("min_p", self.min_p)):
            if not ((column >= 0) & (column <= 1)).all():
                raise ValueError(f"{name} is not within 0 and 1")
        starts = self.banned_starts
        if starts[0] != 0 or starts[-1] != len(self.banned_ids) or (starts[1:] < starts[:-1]).any():
            raise ValueError("banned_starts must ascend from 0 to the number of banned_ids")

    def __len__(self) -> int:
        return len(self.temperature)

    @classmethod
    def of_rows(cls, rows: Sequence[SampleTuple]) -> "SampleColumns":
        """Columns from one tuple per row; at least one row."""
        temperature, top_k, top_p, min_p, seed, choice, position, banned = zip(*rows, strict=True)
        return cls.of(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
            seed=seed, choice=choice, position=position, banned=banned,
        )  # fmt: skip

    @classmethod
    def of(
        cls,
        *,
        temperature: Sequence[float],
        top_k: Sequence[int] | None = None,
        top_p: Sequence[float] | None = None,
        min_p: Sequence[float] | None = None,
        seed: Sequence[int] | None = None,
        choice: Sequence[int] | None = None,
        position: Sequence[int] | None = None,
        banned: Sequence[Sequence[int]] | None = None,
    ) -> "SampleColumns":
        """Columns from plain sequences; one left out is off (filters, bans) or 0 (noise key)."""
        rows = len(temperature)
        off, on = [0] * rows, [1] * rows
        lists: Sequence[Sequence[int]] = [()] * rows if banned is None else banned
        starts = np.zeros(len(lists) + 1, np.int32)
        np.cumsum([len(ids) for ids in lists], out=starts[1:])
        return cls(
            temperature=np.array(temperature, np.float32),
            top_k=np.array(off if top_k is None else top_k, np.int32),
            top_p=np.array(on if top_p is None else top_p, np.float32),
            min_p=np.array(off if min_p is None else min_p, np.float32),
            seed=np.array(off if seed is None else seed, np.uint64),
            choice=np.array(off if choice is None else choice, np.uint32),
            position=np.array(off if position is None else position, np.uint32),
            banned_ids=np.array([token for ids in lists for token in ids], np.int32),
            banned_starts=starts,
        )


def _check(name: str, column: NDArray[Any], dtype: type[np.generic], length: int) -> None:
    if column.dtype != dtype:
        raise TypeError(f"{name} must have dtype {np.dtype(dtype)}, not {column.dtype}")
    if column.shape != (length,):
        raise ValueError(f"{name} has shape {column.shape}, expected ({length},)")
    if not column.flags.c_contiguous:
        raise ValueError(f"{name} must be C-contiguous")
