"""Which tiles attention is computed with: a table, by head_dim, types and kind of device.

Never by how many tokens or sequences there are, and for decode and prefill alike the same number of
keys, in partitions of the same length: so a token's result has the same bits in every batch and
both ways. The rows of a tile are independent of one another, but not of the instruction: on Hopper
a tile of 64 rows and more is computed with wgmma, a smaller one with the older mma, whose sums may
differ. So decode has 64 rows too, however few its heads; that work is hidden by the reading of
keys. The sums over a tile's keys must also be divided among warps in the same way; a test compares
the layouts that Triton chooses.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
import triton

Codes = Literal["int8", "fp8", "fp8_bits"]
"""How a cache holds scaled numbers; fp8_bits: e4m3 on a device that does not convert it."""

PARTITION = 256
"""Tokens of a partition: what one program of a decode step reads of a sequence at a time.

Shorter, and a few sequences would be spread over more programs; longer, and less is written and
read to merge them (at 256, 3% of a bfloat16 cache's bytes with 4 query heads to a key-value head,
half of it written).
"""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Of a kernel: `rows` (query, head) pairs times `keys`, by so many warps, in so many stages."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """Of both kernels; `programs` of decode run on a multiprocessor at once."""

    decode: Tiles
    prefill: Tiles
    programs: int


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """What tiles depend on.

    `multiprocessors`: how many. `hopper`: that or later. `roomy`: more than 100 KiB of shared
    memory a program. `e4m3`: converts float8_e4m3fn itself.
    """

    multiprocessors: int
    hopper: bool
    roomy: bool
    e4m3: bool


# By head_dim rounded up to a power of two. Prefill of 128 rows: with 64, keys would be read from
# the second-level cache faster than it gives them. At 256 columns that does not fit registers.
_NARROW = {
    64: AttentionTiles(Tiles(64, 64, 4, 3), Tiles(128, 64, 8, 3), 4),
    128: AttentionTiles(Tiles(64, 64, 4, 3), Tiles(128, 64, 8, 3), 2),
    256: AttentionTiles(Tiles(64, 32, 8, 3), Tiles(64, 32, 8, 3), 1),
}
# Without tensor cores: for tests and comparisons.
_FLOAT32 = {
    64: AttentionTiles(Tiles(32, 32, 4, 2), Tiles(32, 32, 4, 2), 4),
    128: AttentionTiles(Tiles(32, 32, 4, 2), Tiles(32, 32, 4, 2), 3),
    256: AttentionTiles(Tiles(16, 32, 4, 2), Tiles(16, 32, 4, 2), 2),
}


def attention_tiles(
    wide: int, dtype: torch.dtype, codes: Codes | None, kind: DeviceKind
) -> AttentionTiles:
    """For heads of `wide` columns (`wide_of`), computed from `dtype`."""
    tiles = (_FLOAT32 if dtype == torch.float32 else _NARROW)[wide]
    if not kind.roomy:
        tiles = _changed(tiles, num_stages=2)
    if codes is not None and not kind.hopper:
        # Each warp converts all of a tile's codes there: with 64 keys they overflow its registers.
        # With 128 rows Triton would divide the sums over keys among warps in another way.
        tiles = _changed(replace(tiles, prefill=tiles.decode), keys=32)
    return tiles


def few_queries(rows: int, group: int) -> int:
    """Queries of a sequence whose (query, head) pairs are one tile of split attention."""
    return max(1, rows // group)


def wide_of(head_dim: int) -> int:
    """Columns of a tile. Raises ValueError for heads that are too wide for any."""
    wide = max(64, triton.next_power_of_2(head_dim))
    if wide > 256:
        raise ValueError(f"head_dim {head_dim} is above 256, the most that attention is built for")
    return wide


@cache
def device_kind(device: torch.device) -> DeviceKind:
    """Of a device; a CPU (the interpreter) has few multiprocessors, but more than one."""
    if device.type == "cpu":
        return DeviceKind(2, hopper=True, roomy=True, e4m3=False)
    major, minor = torch.cuda.get_device_capability(device)
    return DeviceKind(
        torch.cuda.get_device_properties(device).multi_processor_count,
        hopper=major >= 9,
        roomy=(major, minor) in ((8, 0), (9, 0), (10, 0), (10, 3)),
        e4m3=(major, minor) >= (8, 9),
    )


def _changed(tiles: AttentionTiles, **changes: int) -> AttentionTiles:
    return AttentionTiles(
        replace(tiles.decode, **changes), replace(tiles.prefill, **changes), tiles.programs
    )
