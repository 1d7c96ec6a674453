"""Whether tenants get equal shares while there is not enough for all, window by window.

Jain's index (Jain, Chiu, Hawe, 1984) of x = tokens that a tenant got over those due to it:
(sum x)^2 / (n sum x^2), 1 where everybody got their due, 1/n where one had it all. Over a whole run
everybody gets what they asked for, whatever the order; what differs is who gets it first. So due is
the max-min fair share of what was done in a window: equal for all, but that nobody is due more than
they asked for, which goes to the others.
"""

import numpy as np
from numpy.typing import NDArray

MAX_TENANTS = 4096


class FairnessWindows:
    """Tenants are small integers, below MAX_TENANTS."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = seconds
        self._num_tenants = 0
        self._waiting: NDArray[np.int64] = np.zeros(MAX_TENANTS, np.int64)  # tokens
        self._got: NDArray[np.int64] = np.zeros(MAX_TENANTS, np.int64)  # tokens, in this window
        self._sum = 0.0
        self.num_windows = 0

    @property
    def index(self) -> float | None:
        """The mean over windows at whose end somebody waited, with work of several tenants; None
        where there was none."""
        return self._sum / self.num_windows if self.num_windows else None

    def queued(self, tenant: int, num_tokens: int) -> None:
        """A request of a tenant, of so many prompt and output tokens, waits."""
        self._num_tenants = max(self._num_tenants, tenant + 1)
        self._waiting[tenant] += num_tokens

    def unqueued(self, tenant: int, num_tokens: int) -> None:
        """It waits no more."""
        self._waiting[tenant] -= num_tokens

    def prompt(self, tenant: int, num_tokens: int) -> None:
        """A prompt of a tenant is there, computed or found."""
        self._got[tenant] += num_tokens

    def outputs(self, tenants: NDArray[np.int32]) -> None:
        """An output token for each entry."""
        if self._num_tenants > 1:
            self._got += np.bincount(tenants, minlength=MAX_TENANTS)

    def step_ends(self, now: float) -> None:
        """Close the window if it is over."""
        if now < self._end:
            return
        self._end = now + self._seconds
        tenants = slice(self._num_tenants)
        got, waiting = self._got[tenants].copy(), self._waiting[tenants]
        self._got[tenants] = 0
        asked = got + waiting
        there = asked > 0
        if waiting.any() and got.any() and there.sum() > 1:
            due = max_min_shares(asked[there], int(got.sum()))
            shares = got[there] / due
            self._sum += float(shares.sum() ** 2 / (len(shares) * (shares**2).sum()))
            self.num_windows += 1

    def check_idle(self) -> None:
        """Assert that nobody is counted as waiting."""
        assert not self._waiting.any(), "nobody waits at the end"


def max_min_shares(asked: NDArray[np.int64], total: int) -> NDArray[np.float64]:
    """Equal shares of `total`, none above what is `asked`, in sum `total`, which is at most the sum
    of what is asked."""
    order = np.argsort(asked, kind="stable")
    ascending = asked[order].astype(np.float64)
    before = np.cumsum(ascending) - ascending
    # The level if those below get what they ask for, and this one and those above share the rest.
    levels = (total - before) / np.arange(len(asked), 0, -1)
    above = np.flatnonzero(levels <= ascending)
    level = float(levels[above[0]] if len(above) else ascending[-1])
    shares: NDArray[np.float64] = np.minimum(asked.astype(np.float64), level)
    return shares
