"""Quantiles of millions of times in a few kilobytes."""

import math

import numpy as np
from numpy.typing import NDArray

_GAMMA = 1.01
_LEAST = 1e-6  # seconds; what is below counts as 0
_NUM_BUCKETS = 2 + math.ceil(math.log(1e18) / math.log(_GAMMA))  # up to 1e12 seconds
_PENDING = 4096


class Quantiles:
    """Counts in buckets that grow by 1%: a quantile is right to 0.5% (as DDSketch, Masson et al.,
    2019), whatever was added and in which order. Mean and maximum are exact.
    """

    def __init__(self) -> None:
        self._counts: NDArray[np.int64] = np.zeros(_NUM_BUCKETS, np.int64)
        self._pending: list[float] = []
        self._sum = 0.0
        self._max = 0.0

    def add(self, seconds: float) -> None:
        """Count one; at least 0."""
        self._pending.append(seconds)
        if len(self._pending) == _PENDING:
            self._settle()

    @property
    def count(self) -> int:
        """How many were added."""
        return int(self._counts.sum()) + len(self._pending)

    @property
    def mean(self) -> float:
        """0 of nothing."""
        self._settle()
        return self._sum / max(1, self.count)

    @property
    def max(self) -> float:
        """0 of nothing."""
        self._settle()
        return self._max

    def at(self, share: float) -> float:
        """The smallest value that at least `share` of all do not exceed; 0 of nothing."""
        self._settle()
        rank = max(1, math.ceil(share * self.count))
        bucket = int(np.searchsorted(np.cumsum(self._counts), rank))
        if bucket == 0 or self.count == 0:
            return 0.0
        return min(self._max, _LEAST * float(_GAMMA ** (bucket - 0.5)))

    def _settle(self) -> None:
        if not self._pending:
            return
        values = np.array(self._pending)
        self._pending.clear()
        self._sum += float(values.sum())
        self._max = max(self._max, float(values.max()))
        buckets = 1 + np.floor(np.log(np.maximum(values, _LEAST) / _LEAST) / math.log(_GAMMA))
        buckets[values < _LEAST] = 0
        last = _NUM_BUCKETS - 1
        self._counts += np.bincount(
            np.minimum(buckets, last).astype(np.int64), minlength=_NUM_BUCKETS
        )
