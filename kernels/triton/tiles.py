"""How a matrix product is cut into programs, and how sums over cut columns are put together.

All products of this package compute out^T [O, T] = weight [O, K] x^T [K, T], weights as the MMA's
left operand: quantised ones get there straight from registers, and few tokens (its right operand
may be 8 wide) cost no more than they need.

A row's bits depend on nothing but its own numbers. The accumulator of an element takes the columns
in order, in runs that depend on (O, K) alone (`Runs`); the sums of the runs are added in order. How
many tokens a tile has changes the MMA's width only (on sm_90 always wgmma m64, on sm_80 always
m16n8), never the order of its sums. Whether the runs of a tile are computed by as many programs, of
which the last to end adds them up, or by one after another is a matter of speed.
"""

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
import triton
import triton.language as tl

_PROCESSORS = 132
"""Of an H100 or H200 (an A100 has 108). Runs are the same on all devices."""
_PROGRAMS = 240
"""So many programs, two a processor or nearly, keep them all reading."""
_EVEN = 0.9  # of the processors' time that is used if each program takes equally long
_MOST_RUNS = 8
_LEAST_BLOCKS = 4  # of a run: fewer cost more to add up than they save
_TILE_OUTPUTS = 64  # the least that wgmma takes; fixes the runs, whatever the tile
_PARTIALS = 1 << 22  # float32 elements of the workspace
_TICKETS = 1 << 12
_SHARED_KIB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}
"""Shared memory that a program may have, by compute capability; 99 of all others (8.6, 8.9, 12)."""
_GROUP = tl.constexpr(8)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Triton's interpreter has bfloat16 as its bits: it moves and converts them, but cannot compute."""


Merge = Literal["none", "apart", "after"]
"""A tile has one run; runs are computed by programs of their own; by one program, in turn."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Columns of a matrix as `count` runs of `blocks` blocks each, the last maybe shorter."""

    count: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Tile:
    """One program's share, and how it is compiled."""

    outputs: int
    tokens: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class MatmulWorkspace:
    """Sums of runs, float32, and tickets, int32 zeros (each product leaves them zero again).

    Products that share it must be on one stream.
    """

    partials: torch.Tensor
    tickets: torch.Tensor


def matmul_workspace(device: torch.device) -> MatmulWorkspace:
    """Make one, 16 MiB. Before graphs are captured: they keep its address."""
    return MatmulWorkspace(
        torch.empty(_PARTIALS, dtype=torch.float32, device=device),
        torch.zeros(_TICKETS, dtype=torch.int32, device=device),
    )


_workspaces: dict[torch.device, MatmulWorkspace] = {}


def kept_workspace(device: torch.device) -> MatmulWorkspace:
    """A workspace that is made once a device, for callers without one of their own."""
    if device not in _workspaces:
        _workspaces[device] = matmul_workspace(device)
    return _workspaces[device]


def runs_of(outputs: int, columns: int, block: int) -> Runs:
    """How the columns are summed up: the fewest runs with which a single token makes programs
    enough, and nearly a multiple of the processors; one where the tiles alone are enough."""
    blocks = triton.cdiv(columns, block)
    each = triton.cdiv(blocks, _count(triton.cdiv(outputs, _TILE_OUTPUTS), blocks))
    return Runs(triton.cdiv(blocks, each), each)


def _count(tiles: int, blocks: int) -> int:
    most = max(1, min(blocks // _LEAST_BLOCKS, _MOST_RUNS))
    enough = [count for count in range(1, most + 1) if count * tiles >= _PROGRAMS]
    if tiles >= 2 * _PROCESSORS or not enough:
        return 1 if enough else most
    best = max(enough, key=lambda count: _evenness(count * tiles))
    return next((count for count in enough if _evenness(count * tiles) >= _EVEN), best)


def _evenness(programs: int) -> float:
    return programs / (triton.cdiv(programs, _PROCESSORS) * _PROCESSORS)


def merge_of(tile: Tile, outputs: int, tokens: int, runs: Runs) -> Merge:
    """Who computes the runs of a tile.

    Programs of their own where all tokens are in one tile, or the tiles alone are too few programs,
    while the sums fit the workspace.
    """
    if runs.count == 1:
        return "none"
    tiles = _tiles(tile, outputs, tokens)
    elements = runs.count * tiles * tile.outputs * tile.tokens
    few = (tokens <= tile.tokens or 2 * tiles < _PROGRAMS) and tiles <= _TICKETS
    return "apart" if few and elements <= _PARTIALS else "after"


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Of a GPU; 9.0 where there is none, for tests of what a Hopper would do."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def stages_within(tile: Tile, stage_bytes: int, device: torch.device) -> int:
    """The tile's stages, fewer where shared memory is too small for them; at least two."""
    room = (_SHARED_KIB.get(capability(device), 99) - 1) << 10
    return max(2, min(tile.num_stages, room // stage_bytes))


def num_programs(tile: Tile, outputs: int, tokens: int, runs: Runs, merge: Merge) -> int:
    """Programs of a product."""
    return _tiles(tile, outputs, tokens) * (runs.count if merge == "apart" else 1)


def _tiles(tile: Tile, outputs: int, tokens: int) -> int:
    return triton.cdiv(outputs, tile.outputs) * triton.cdiv(tokens, tile.tokens)


@triton.jit
def dot(left, right, sums):
    """sums + left right; float32 without tensor cores, as they would round it."""
    if INTERPRETED and left.dtype == tl.bfloat16:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, sums, input_precision="ieee")


@triton.jit
def place(tiles_o, tiles_t, APART: tl.constexpr):
    """This program's (run, tile of outputs, tile of tokens); a run is 0 unless they are apart.

    Neighbouring programs share inputs: 8 tiles of outputs against one tile of tokens, and so on.
    """
    program = tl.program_id(0)
    tiles = tiles_o * tiles_t
    run = program // tiles if APART else 0
    tile = program % tiles if APART else program
    first = tile // (_GROUP * tiles_t) * _GROUP
    height = tl.minimum(tiles_o - first, _GROUP)
    within = tile % (_GROUP * tiles_t)
    return run, first + within % height, within // height


@triton.jit
def finish(
    total, rows_o, rows_t, outputs, num_tokens, bias, out, out_stride,
    partials, tickets, run, runs, tile, tiles,
    BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Store out = total^T + bias; where runs are apart, whoever is the last of its tile does."""
    if APART:
        size: tl.constexpr = BLOCK_O * BLOCK_T
        lanes = tl.arange(0, BLOCK_O)[:, None] * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
        sums = partials + tile * size + lanes
        tl.store(sums + run * tiles * size, total)
        tl.debug_barrier()  # the ticket is one thread's, and must come after all threads' sums
        taken = tl.atomic_add(tickets + tile, 1, sem="acq_rel")
        if taken == runs - 1:
            merged = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
            for each in range(runs):
                # Other processors wrote these: not by way of this one's first-level cache.
                merged += tl.load(sums + each * tiles * size, cache_modifier=".cg")
            tl.store(tickets + tile, 0)
            _store(merged, rows_o, rows_t, outputs, num_tokens, bias, out, out_stride)
    else:
        _store(total, rows_o, rows_t, outputs, num_tokens, bias, out, out_stride)


@triton.jit
def _store(total, rows_o, rows_t, outputs, num_tokens, bias, out, out_stride):
    within = rows_o < outputs
    if bias is not None:
        total += tl.load(bias + rows_o, mask=within, other=0).to(tl.float32)[:, None]
    tl.store(
        out + rows_t.to(tl.int64)[None, :] * out_stride + rows_o[:, None],
        total.to(out.dtype.element_ty),
        mask=within[:, None] & (rows_t < num_tokens)[None, :],
    )
