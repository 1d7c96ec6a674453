"""The paged attention kernels against the reference, and against themselves bit for bit."""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from sampler_cases import using_isa
from triptych.kernels import cpu
from triptych.kernels.reference.paged_attention import PagedRows, paged_attention

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
TOLERANCES = {"float32": 2e-5, "bfloat16": 2e-2, "int8": 5e-2}


@dataclass(frozen=True)
class Shape:
    """Of a cache and the queries over it."""

    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    window: int | None = None
    dtype: str = "float32"
    soft_cap: float = 0.0


class Case:
    """Sequences of some lengths whose last tokens are queries, in shuffled blocks."""

    def __init__(self, shape: Shape, rows: list[tuple[int, int]], seed: int = 0) -> None:
        """`rows`: (length, queries) of each."""
        rng = np.random.default_rng(seed)
        self.shape = shape
        self.rows = rows
        self.keys, self.values = (
            [
                rng.standard_normal((length, shape.kv_heads, shape.head_dim)).astype(np.float32)
                for length, _ in rows
            ]
            for _ in range(2)
        )
        self.q = [
            2 * rng.standard_normal((n, shape.heads, shape.head_dim)).astype(np.float32)
            for _, n in rows
        ]
        counts = [-(-length // shape.block_size) for length, _ in rows]
        order = rng.permutation(sum(counts) + 2).astype(np.int32)
        self.num_blocks = len(order)
        self.tables = np.full((len(rows), max(counts)), -1, np.int32)
        for row, count in enumerate(counts):
            self.tables[row, :count], order = order[:count], order[count:]

    def cache(self, poison: bool = False) -> cpu.KvCache:
        """A cache that holds all tokens; `poison` fills the rest with NaN first."""
        shape = self.shape
        cache = cpu.KvCache(
            self.num_blocks, shape.block_size, shape.kv_heads, shape.head_dim, shape.dtype
        )
        if poison:
            slots = np.arange(self.num_blocks * shape.block_size, dtype=np.int32)
            nan = np.full((len(slots), shape.kv_heads, shape.head_dim), np.nan, np.float32)
            cache.store(slots, nan, nan)
        for row, (length, _) in enumerate(self.rows):
            place = np.arange(length)
            blocks = self.tables[row, place // shape.block_size]
            slots = (blocks * shape.block_size + place % shape.block_size).astype(np.int32)
            cache.store(slots, self.keys[row], self.values[row])
        return cache

    def attend(self, cache: cpu.KvCache, threads: int = 1) -> Floats:
        """All queries in one call, [tokens, heads, head_dim]."""
        scale = np.float32(self.shape.head_dim**-0.5)
        return cache.attend(
            np.concatenate(self.q) * scale,
            self.tables,
            np.concatenate([[0], np.cumsum([n for _, n in self.rows])]).astype(np.int32),
            np.array([length for length, _ in self.rows], np.int32),
            self.shape.window,
            threads,
            self.shape.soft_cap,
        )

    def piece(self, cache: cpu.KvCache, row: int, start: int, stop: int) -> Floats:
        """Queries [start, stop) of one row, alone, when no later token is known."""
        length, n = self.rows[row]
        scale = np.float32(self.shape.head_dim**-0.5)
        return cache.attend(
            self.q[row][start:stop] * scale,
            self.tables[row : row + 1],
            np.array([0, stop - start], np.int32),
            np.array([length - n + stop], np.int32),
            self.shape.window,
            1,
            self.shape.soft_cap,
        )

    def expected(self) -> Floats:
        """The reference, on the unrounded keys and values."""
        shape = self.shape
        out = []
        for keys, values, q in zip(self.keys, self.values, self.q, strict=True):
            rows = PagedRows(
                block_tables=torch.zeros((1, 1), dtype=torch.int32),
                row_starts=torch.tensor([0, len(q)]),
                kv_lengths=torch.tensor([len(keys)]),
            )
            k, v = torch.from_numpy(keys)[None], torch.from_numpy(values)[None]
            scale = shape.head_dim**-0.5
            cap = shape.soft_cap or None
            done = paged_attention(torch.from_numpy(q), k, v, rows, scale, shape.window, cap)
            out.append(done.numpy())
        result: Floats = np.concatenate(out)
        return result


SHAPES = [
    Shape(),
    Shape(heads=3, kv_heads=3, head_dim=8),
    Shape(heads=9, kv_heads=3, head_dim=64),
    Shape(heads=7, kv_heads=1, head_dim=80, block_size=32),
    Shape(heads=2, kv_heads=1, head_dim=128, block_size=64),
    Shape(heads=16, kv_heads=2, head_dim=18, block_size=128),
    Shape(window=5),
    Shape(window=70, head_dim=24),
    Shape(window=600),
    Shape(heads=9, kv_heads=3, head_dim=64, soft_cap=2.0),
    Shape(window=70, head_dim=24, soft_cap=50.0),
]
ROWS = [(1, 1), (16, 1), (17, 17), (64, 3), (65, 65), (700, 1), (1030, 40), (513, 2)]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_near_the_reference_and_the_same_bits_everywhere(shape: Shape, dtype: str) -> None:
    case = Case(replace(shape, dtype=dtype), ROWS)
    expected = case.expected()
    bits = []
    for isa in cpu.supported_isas():
        with using_isa(isa):
            for threads in (1, 4):
                bits.append(case.attend(case.cache(), threads))
    np.testing.assert_allclose(bits[0], expected, atol=TOLERANCES[dtype])
    for other in bits[1:]:
        np.testing.assert_array_equal(other.view(np.uint32), bits[0].view(np.uint32))


@pytest.mark.parametrize(("window", "cap"), [(None, 0.0), (40, 0.0), (200, 0.0), (200, 3.0)])
def test_a_prompt_in_pieces_gives_the_same_bits(window: int | None, cap: float) -> None:
    case = Case(Shape(window=window, dtype="bfloat16", soft_cap=cap), [(700, 700)])
    cache = case.cache()
    whole = case.attend(cache)
    rng = np.random.default_rng(1)
    cuts = [0, *sorted(int(cut) for cut in rng.integers(1, 700, 12)), 700]
    for start, stop in pairwise(cuts):
        if start < stop:
            piece = case.piece(cache, 0, start, stop)
            np.testing.assert_array_equal(piece, whole[start:stop])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("window", "cap"), [(None, 0.0), (20, 0.0), (20, 3.0)])
def test_what_a_query_does_not_see_cannot_reach_it(
    dtype: str, window: int | None, cap: float
) -> None:
    """Former owners of a block may have left NaN behind the last token; so may later tokens."""
    shape = Shape(window=window, dtype=dtype, soft_cap=cap)
    case = Case(shape, [(1, 1), (30, 30), (90, 3), (530, 1)])
    for isa in cpu.supported_isas():
        with using_isa(isa):
            clean, poisoned = case.attend(case.cache()), case.attend(case.cache(poison=True))
        np.testing.assert_array_equal(poisoned, clean)
    before = case.attend(case.cache())
    case.keys[1][20:], case.values[1][20:] = np.nan, np.nan
    after = case.attend(case.cache())
    np.testing.assert_array_equal(after[:21], before[:21])
    assert np.isnan(after[21:31]).all()
    np.testing.assert_array_equal(after[31:], before[31:])


def test_extreme_scores() -> None:
    case = Case(Shape(), [(300, 300)])
    case.q[0] *= 1e4
    np.testing.assert_allclose(case.attend(case.cache()), case.expected(), atol=1e-3)
    case.q[0][:] = 0
    np.testing.assert_allclose(case.attend(case.cache()), case.expected(), atol=1e-5)


def test_bfloat16_rounds_to_even() -> None:
    """With one token attention gives the stored value back."""
    cache = cpu.KvCache(1, 16, 1, 16, "bfloat16")
    bits = np.arange(0x3F800000, 0x3F800000 + 16 * 0x1000, 0x1000, dtype=np.uint32)
    values = bits.view(np.float32).reshape(1, 1, 16)
    cache.store(np.zeros(1, np.int32), values, values)
    one = np.array([1], np.int32)
    got = cache.attend(values, np.zeros((1, 1), np.int32), np.array([0, 1], np.int32), one, None, 1)
    expected = torch.from_numpy(values).to(torch.bfloat16).to(torch.float32).numpy()
    np.testing.assert_array_equal(got, expected)
