"""Which numbers of rows graphs are captured for, and which graph a decode step takes.

A graph computes exactly its own number of rows; a step with fewer fills it with rows of padding,
which have no tokens, store nothing and are read by nobody.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

LARGEST = 512
"""More rows than this keep a GPU busy long enough for its launches to be hidden."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """Sizes, ascending."""

    sizes: tuple[int, ...]

    @classmethod
    def usual(cls, max_num_seqs: int) -> "Buckets":
        """1, 2, 4, by 8 to 256, by 16 to 512; up to the largest batch there can be, which has a
        size of its own."""
        sizes = (1, 2, 4, *range(8, 257, 8), *range(272, LARGEST + 1, 16))
        most = min(max_num_seqs, LARGEST)
        return cls((*(size for size in sizes if size < most), most))

    @classmethod
    def of(cls, sizes: Iterable[int], max_num_seqs: int) -> "Buckets":
        """The sizes that were asked for. One that is larger than every batch is the largest
        batch's: there are buffers for no more rows."""
        return cls(tuple(sorted({min(size, max_num_seqs) for size in sizes if size >= 1})))

    def for_rows(self, num_rows: int) -> int | None:
        """The smallest size that holds so many rows; None: there is none, the step runs eagerly."""
        place = bisect_left(self.sizes, num_rows)
        return self.sizes[place] if place < len(self.sizes) else None
