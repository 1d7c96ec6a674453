"""Token ids for arrivals that only say how many: cheap, and shared exactly where they are to be."""

from functools import lru_cache

import numpy as np

from triptych.services.simulator.arrivals import NO_GROUP, Arrival

VOCABULARY = 49152
_HALF = VOCABULARY // 2
_POOL = 1 << 16
_STRIDE = 40503  # odd, so offsets into the pool go through all of it


class Prompts:
    """Slices of one pool of random tokens behind two that number the request, or its group.

    Groups are numbered in the upper half of the vocabulary and requests in the lower, so that
    no prompt begins like another by accident.
    """

    def __init__(self, seed: int, max_model_len: int) -> None:
        random = np.random.Generator(np.random.Philox(key=np.array([seed, 1 << 63], np.uint64)))
        pool = random.integers(VOCABULARY, size=_POOL).tolist()
        # A tuple, so that a slice is made of the same integers and costs next to nothing.
        self._most = max_model_len + 1
        self._pool: tuple[int, ...] = tuple(
            (pool * (2 + self._most // _POOL))[: _POOL + self._most]
        )
        self._prefix = lru_cache(maxsize=1024)(self._new_prefix)

    def of(self, serial: int, arrival: Arrival) -> tuple[int, ...]:
        """The prompt of the `serial`-th request of a trace. One that is too long for the engine is
        cut to what is still too long."""
        if arrival.prompt_token_ids:
            return arrival.prompt_token_ids
        num_prompt = min(arrival.num_prompt, self._most)
        if arrival.prefix_group == NO_GROUP:
            return self._own(serial, num_prompt)
        prefix = self._prefix(arrival.prefix_group, min(arrival.num_prefix, num_prompt))
        return prefix + self._own(serial, num_prompt - len(prefix))

    def _own(self, serial: int, count: int) -> tuple[int, ...]:
        return self._numbered(serial, serial % _HALF, serial // _HALF % _HALF, count)

    def _new_prefix(self, group: int, count: int) -> tuple[int, ...]:
        first, second = _HALF + group % _HALF, _HALF + group // _HALF % _HALF
        return self._numbered(group, first, second, count)

    def _numbered(self, number: int, first: int, second: int, count: int) -> tuple[int, ...]:
        if count <= 2:
            return (first, second)[:count]
        offset = number * _STRIDE % _POOL
        return (first, second, *self._pool[offset : offset + count - 2])
