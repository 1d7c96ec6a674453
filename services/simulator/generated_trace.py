"""Traces by chance: Poisson arrivals, log-normal lengths, tenants, priorities, shared prefixes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from triptych.services.simulator.arrivals import NO_GROUP, Arrival

_CHUNK = 4096  # requests drawn together: memory does not grow with the trace


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceShape:
    """What a generated trace looks like. `max_len` bounds prompt + output tokens of a request.

    Lengths are log-normal: half of them are below the median, and `sigma` is the deviation of
    their logarithm (0: all equal). Tenant k of 1, 2, ... sends in proportion to k ** -tenant_skew.
    Priorities 0 to num_priorities - 1 are equally frequent. With `prefix_groups`, `prefix_share`
    of the requests begin with `prefix_tokens` tokens that their group has in common; the log-normal
    part comes behind.
    """

    num_requests: int
    request_rate: float  # per second
    max_len: int
    prompt_median: float = 128.0
    prompt_sigma: float = 0.8
    output_median: float = 64.0
    output_sigma: float = 0.8
    num_tenants: int = 1
    tenant_skew: float = 0.0
    num_priorities: int = 1
    prefix_groups: int = 0
    prefix_tokens: int = 0
    prefix_share: float = 1.0
    seed: int = 0


class GeneratedTrace:
    """The same shape gives the same arrivals; more requests go on where fewer end.

    Chunk i is drawn by Philox (Salmon et al., 2011) keyed by seed and i: there is no state.
    """

    def __init__(self, shape: TraceShape) -> None:
        self._shape = shape
        self._given = 0
        weights = np.arange(1, shape.num_tenants + 1, dtype=np.float64) ** -shape.tenant_skew
        self._tenant_shares = weights / weights.sum()
        # One tenant needs no name: it is everybody.
        names = [f"tenant-{k}" for k in range(1, shape.num_tenants + 1)]
        self._tenants = names if len(names) > 1 else [""]

    @property
    def fraction(self) -> float:
        """Of its requests."""
        return self._given / self._shape.num_requests

    def __iter__(self) -> Iterator[Arrival]:
        clock, shape = 0.0, self._shape
        for chunk in range(-(-shape.num_requests // _CHUNK)):
            columns, clock = self._draw(chunk, clock)
            for row in zip(*columns, strict=True):
                if self._given == shape.num_requests:
                    return
                self._given += 1
                at, num_prompt, num_output, priority, tenant, group, num_prefix = row
                name = self._tenants[tenant]
                yield Arrival(at, num_prompt, num_output, priority, name, group, num_prefix)

    def _draw(self, chunk: int, clock: float) -> tuple[list[list[int]], float]:
        shape = self._shape
        key = np.array([shape.seed, chunk], np.uint64)
        random = np.random.Generator(np.random.Philox(key=key))
        at = clock + np.cumsum(random.exponential(1.0 / shape.request_rate, _CHUNK))
        own = _lengths(random, shape.prompt_median, shape.prompt_sigma)
        num_output = _lengths(random, shape.output_median, shape.output_sigma)
        priority = random.integers(shape.num_priorities, size=_CHUNK)
        tenant = random.choice(shape.num_tenants, _CHUNK, p=self._tenant_shares)
        group = random.integers(max(1, shape.prefix_groups), size=_CHUNK)
        shares = random.random(_CHUNK) < shape.prefix_share
        group[~shares | (shape.prefix_groups == 0)] = NO_GROUP
        num_prefix = np.where(group == NO_GROUP, 0, shape.prefix_tokens)
        # At least one token of its own, or the whole prompt would be another's.
        num_prefix = np.minimum(num_prefix, shape.max_len - 2)
        num_prompt = np.minimum(num_prefix + own, shape.max_len - 1)
        num_output = np.minimum(num_output, shape.max_len - num_prompt)
        columns = (at, num_prompt, num_output, priority, tenant, group, num_prefix)
        return [column.tolist() for column in columns], float(at[-1])


def _lengths(random: np.random.Generator, median: float, sigma: float) -> NDArray[np.int64]:
    drawn = random.lognormal(math.log(median), sigma, _CHUNK)
    # Far above any length that fits, and far below where the conversion overflows.
    return np.maximum(1, np.rint(np.minimum(drawn, 1e15))).astype(np.int64)
