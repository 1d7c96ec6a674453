"""Which part of every matrix a rank of a tensor-parallel group computes with.

Shard r of n of m things is [r * m / n, (r + 1) * m / n). Outputs of q, k, v, gate and up are cut
(by whole heads), inputs of o and down, whose products are then summed over the ranks, and the rows
of embedding and head, which are padded to a multiple of n.
"""

from dataclasses import dataclass

from triptych.services.executor.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """Rows [row_start, row_stop) and columns [column_start, column_stop) of a stored parameter of
    `shape`; several parts, one below the other, make up a fused matrix."""

    parameter: str
    shape: tuple[int, int]
    row_start: int
    row_stop: int
    column_start: int
    column_stop: int

    @classmethod
    def whole(cls, parameter: str, shape: tuple[int, int]) -> "MatrixPart":
        """All of it."""
        return cls(parameter, shape, 0, shape[0], 0, shape[1])

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return self.row_stop - self.row_start

    @property
    def columns(self) -> int:
        """How many columns it has."""
        return self.column_stop - self.column_start


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size`."""

    rank: int = 0
    size: int = 1

    def check(self, config: ModelConfig) -> None:
        """Raise StartupError, naming what does not divide over the ranks."""
        for name, count in (
            ("num_heads", config.num_heads),
            ("intermediate_size", config.intermediate_size),
        ):
            if count % self.size:
                raise config.refused(
                    f"tensor_parallel_size {self.size} does not divide {name} {count}"
                )
        heads = config.num_kv_heads
        if heads % self.size and self.size % heads:
            raise config.refused(
                f"tensor_parallel_size {self.size} neither divides num_kv_heads {heads}, nor is a "
                f"multiple of it"
            )

    def span(self, count: int) -> tuple[int, int]:
        """Start and stop of this rank's share of `count`, which the size divides."""
        return self.rank * count // self.size, (self.rank + 1) * count // self.size

    def kv_span(self, num_kv_heads: int) -> tuple[int, int]:
        """Its key-value heads: as `span`, or the one that it shares with neighbours."""
        if num_kv_heads >= self.size:
            return self.span(num_kv_heads)
        head = self.rank * num_kv_heads // self.size
        return head, head + 1

    def vocabulary(self, vocabulary_size: int) -> tuple[int, int, int]:
        """Start and stop of its rows of embedding and head, and how many a rank has with padding:
        the last ranks' may lie behind the vocabulary."""
        share = -(-vocabulary_size // self.size)
        start = min(self.rank * share, vocabulary_size)
        return start, min(start + share, vocabulary_size), share

    def outputs(self, parameter: str, shape: tuple[int, int]) -> MatrixPart:
        """Its rows of a matrix whose outputs are cut."""
        start, stop = self.span(shape[0])
        return MatrixPart(parameter, shape, start, stop, 0, shape[1])

    def inputs(self, parameter: str, shape: tuple[int, int]) -> MatrixPart:
        """Its columns of a matrix whose inputs are cut."""
        start, stop = self.span(shape[1])
        return MatrixPart(parameter, shape, 0, shape[0], start, stop)

    def kv_outputs(
        self, parameter: str, shape: tuple[int, int], num_kv_heads: int, head_dim: int
    ) -> MatrixPart:
        """Its rows of k or v."""
        start, stop = self.kv_span(num_kv_heads)
        return MatrixPart(parameter, shape, start * head_dim, stop * head_dim, 0, shape[1])
