"""Sequences in a paged cache, with what attention over them is in float64."""

from dataclasses import dataclass, field

import torch

from triptych.kernels.reference.kv_codes import LARGEST, kv_codes, kv_values

UNUSED = 2**30  # block ids behind a sequence's last: never to be read


@dataclass(frozen=True)
class Shape:
    """Of a model and its cache; `cache` None: of q's dtype."""

    heads: int = 4
    kv_heads: int = 1
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache: torch.dtype | None = None
    window: int | None = None
    cap: float | None = None

    @property
    def cache_dtype(self) -> torch.dtype:
        return self.cache or self.dtype

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


@dataclass(frozen=True)
class Case:
    """rows: (queries, tokens) of each sequence. `keys`, `values`: of each, float64 [length, M, D].

    Slots and blocks that no sequence owns hold NaN; table entries that none has, UNUSED.
    """

    shape: Shape
    rows: list[tuple[int, int]]
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    scales: tuple[torch.Tensor, torch.Tensor] | None
    block_tables: torch.Tensor
    row_starts: torch.Tensor
    kv_lengths: torch.Tensor
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    @property
    def last(self) -> torch.Tensor:
        """Each row's last token: the one that a decode step would have."""
        return self.row_starts[1:].long() - 1


def make_case(shape: Shape, rows: list[tuple[int, int]], spare: int = 2) -> Case:
    """Random sequences in shuffled blocks."""
    size = shape.block_size
    needed = [-(-length // size) for _, length in rows]
    blocks = sum(needed) + spare
    tables = torch.full((len(rows), max(needed, default=0) + 1), UNUSED, dtype=torch.int32)
    order = torch.randperm(blocks, dtype=torch.int32)
    full = (blocks, size, shape.kv_heads, shape.head_dim)
    coded = shape.cache_dtype in LARGEST
    caches, every, scales = [], [], []
    for _ in range(2):
        held = torch.full(full, torch.nan)
        scale = torch.full(full[:3], torch.nan)
        parts, at = [], 0
        for row, (_, length) in enumerate(rows):
            own = order[at : at + needed[row]]
            tables[row, : len(own)] = own
            at += len(own)
            places = own.long().repeat_interleave(size)[:length], torch.arange(length) % size
            numbers = torch.randn(length, *full[2:])
            if coded:
                codes, scale[places] = kv_codes(numbers, shape.cache_dtype)
                held[places] = codes.to(torch.float32)
                parts.append(kv_values(codes, scale[places]).double())
            else:
                held[places] = numbers.to(shape.cache_dtype).to(torch.float32)
                parts.append(held[places].double())
        if shape.cache_dtype == torch.int8:
            held = held.nan_to_num(nan=99)
        caches.append(held.to(shape.cache_dtype))
        every.append(parts)
        scales.append(scale)
    counts = torch.tensor([0, *(count for count, _ in rows)])
    total = int(counts.sum())
    return Case(
        shape, rows, torch.randn(total, shape.heads, shape.head_dim).to(shape.dtype),
        caches[0], caches[1], (scales[0], scales[1]) if coded else None, tables,
        counts.cumsum(0).to(torch.int32),
        torch.tensor([length for _, length in rows], dtype=torch.int32), every[0], every[1],
    )  # fmt: skip


def truth(case: Case) -> torch.Tensor:
    """Attention of every query, float64 [T, N, D]; one at a time."""
    shape = case.shape
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    starts = case.row_starts.tolist()
    group = shape.heads // shape.kv_heads
    for row, (count, length) in enumerate(case.rows):
        for query in range(count):
            position = length - count + query
            first = 0 if shape.window is None else max(0, position + 1 - shape.window)
            k, v = (
                part[row][first : position + 1].repeat_interleave(group, 1)
                for part in (case.keys, case.values)
            )
            q = case.q[starts[row] + query].double()
            scores = torch.einsum("nd,lnd->nl", q, k) * shape.scale
            if shape.cap is not None:
                scores = shape.cap * torch.tanh(scores / shape.cap)
            out[starts[row] + query] = torch.einsum("nl,lnd->nd", scores.softmax(-1), v)
    return out
