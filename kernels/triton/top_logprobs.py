"""Logprobs of drawn tokens and of the likeliest ones, by the model's own logits, on the device.

As `kernels.reference.sampler_logprobs`: fixed-point masses, so sums do not depend on their order.
Three launches: the largest ids of each piece of a row, the masses of each piece, their merger.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
import triton
import triton.language as tl

from triptych.kernels.triton.sampler import SampleColumns
from triptych.kernels.triton.sampler_rows import (
    LOGPROBS,
    NO_KEY,
    NO_PACKED,
    distances,
    id_of_packed,
    integer,
    key_of,
    key_of_packed,
    masses,
    pack,
    value_of,
)
from triptych.kernels.triton.variants import Kernel, Variant

MOST = 32
"""Likeliest ids that can be asked for."""
_PIECE = 4096
_TILE = 1024
_WARPS = 8
LOWEST = tl.constexpr(-3.4028234663852886e38)


class TopLogprobs(Protocol):
    """Where results go: logprobs float32 [S], ranks int32 [S], top_counts int32 [S]; top_ids int32
    and top_logprobs float32 [S, k], likeliest first."""

    @property
    def logprobs(self) -> torch.Tensor:
        """Of the tokens."""

    @property
    def ranks(self) -> torch.Tensor:
        """1 + how many ids are likelier."""

    @property
    def top_counts(self) -> torch.Tensor:
        """How many of the likeliest are given."""

    @property
    def top_ids(self) -> torch.Tensor:
        """The likeliest."""

    @property
    def top_logprobs(self) -> torch.Tensor:
        """Theirs."""


class LogprobsWorkspace(NamedTuple):
    """Scratch memory for a number of samples; made by `logprobs_workspace`."""

    piece: int
    candidates: torch.Tensor
    masses: torch.Tensor
    closer: torch.Tensor


@triton.jit
def _wants(rows, params, token_ids, sample):
    wanted = integer(params, sample, LOGPROBS) >= 0
    return wanted & (tl.load(rows + sample) >= 0) & (tl.load(token_ids + sample) >= 0)


@triton.jit
def candidates_kernel(
    logits, row_stride, vocabulary, rows, params, token_ids, candidates, splits,
    PIECE: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """The largest logits of a piece, packed, largest first; one at least, for the row's peak."""
    sample = tl.program_id(0)
    split = tl.program_id(1)
    if _wants(rows, params, token_ids, sample):
        row = tl.load(rows + sample).to(tl.int64)
        ids = split * PIECE + tl.arange(0, PIECE)
        within = ids < vocabulary
        x = tl.load(logits + row * row_stride + ids, mask=within, other=float("-inf"))
        packed = tl.where(within, pack(key_of(x.to(tl.float32)), ids), NO_PACKED)
        base = candidates + (sample * splits + split) * TOP
        count = tl.minimum(integer(params, sample, LOGPROBS), TOP)
        for place in range(tl.maximum(count, 1)):
            best = tl.max(packed, axis=0)
            tl.store(base + place, best)
            packed = tl.where(packed == best, NO_PACKED, packed)


@triton.jit
def _candidates_of(
    candidates, sample, splits, count, SPLITS: tl.constexpr, TOP: tl.constexpr, PLACES: tl.constexpr
):
    """All of a sample's, int64 [SPLITS, PLACES]."""
    split = tl.arange(0, SPLITS)[:, None]
    place = tl.arange(0, PLACES)[None, :]
    within = (split < splits) & (place < tl.minimum(count, TOP))
    found = candidates + (sample * splits + split) * TOP + place
    return tl.load(found, mask=within, other=NO_PACKED)


@triton.jit
def masses_kernel(
    logits, row_stride, vocabulary, rows, params, token_ids, candidates, sums, closer, splits,
    SPLITS: tl.constexpr, PIECE: tl.constexpr, TILE: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """The masses of a piece, and how many of its ids are likelier than the token."""
    sample = tl.program_id(0)
    split = tl.program_id(1)
    if _wants(rows, params, token_ids, sample):
        peaks = _candidates_of(candidates, sample, splits, 1, SPLITS, TOP, 1)
        peak = value_of(key_of_packed(tl.max(tl.max(peaks, axis=1), axis=0)))
        base = logits + tl.load(rows + sample).to(tl.int64) * row_stride
        own = distances(tl.load(base + tl.load(token_ids + sample)).to(tl.float32), peak, 1.0)
        mass = tl.zeros((TILE,), tl.int64)
        under = tl.zeros((TILE,), tl.int32)
        for start in range(0, tl.minimum(PIECE, vocabulary - split * PIECE), TILE):
            ids = split * PIECE + start + tl.arange(0, TILE)
            x = tl.load(base + ids, mask=ids < vocabulary, other=float("-inf")).to(tl.float32)
            distance = distances(x, peak, 1.0)
            mass += masses(distance)
            under += (distance < own).to(tl.int32)
        tl.store(sums + sample * splits + split, tl.sum(mass, axis=0))
        tl.store(closer + sample * splits + split, tl.sum(under, axis=0))


@triton.jit
def _logprob(x, peak, log_total):
    exact = tl.maximum(tl.minimum(-distances(x, peak, 1.0) - log_total, 0.0), LOWEST)
    return exact.to(tl.float32)


# Where results lie in their memory differs from step to step.
@triton.jit(
    do_not_specialize_on_alignment=[
        "logprobs", "ranks", "top_counts", "top_ids", "top_logprobs",
    ]
)  # fmt: skip
def logprobs_kernel(
    logits, row_stride, rows, params, token_ids, candidates, sums, closer,
    logprobs, ranks, top_counts, top_ids, top_logprobs, top_stride, splits,
    SPLITS: tl.constexpr, TOP: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """The results of a sample from what its pieces found."""
    sample = tl.program_id(0)
    if _wants(rows, params, token_ids, sample):
        lanes = tl.arange(0, SPLITS)
        mine = sample * splits + lanes
        mass = tl.sum(tl.load(sums + mine, mask=lanes < splits, other=0), axis=0)
        log_total = tl.log(mass.to(tl.float64) * 5.684341886080802e-14)  # 2^-44
        asked = integer(params, sample, LOGPROBS)
        packed = _candidates_of(
            candidates, sample, splits, tl.maximum(asked, 1), SPLITS, TOP, PLACES
        )
        peak = value_of(key_of_packed(tl.max(tl.max(packed, axis=1), axis=0)))
        base = logits + tl.load(rows + sample).to(tl.int64) * row_stride
        x = tl.load(base + tl.load(token_ids + sample)).to(tl.float32)
        tl.store(logprobs + sample, _logprob(x, peak, log_total))
        rank = 1 + tl.sum(tl.load(closer + mine, mask=lanes < splits, other=0), axis=0)
        tl.store(ranks + sample, rank)
        count = 0
        for place in range(tl.minimum(asked, TOP)):
            best = tl.max(tl.max(packed, axis=1), axis=0)
            key = key_of_packed(best)
            if (best > NO_PACKED) & (key > NO_KEY):
                tl.store(top_ids + sample * top_stride + place, id_of_packed(best))
                value = _logprob(value_of(key), peak, log_total)
                tl.store(top_logprobs + sample * top_stride + place, value)
                count += 1
            packed = tl.where(packed == best, NO_PACKED, packed)
        tl.store(top_counts + sample, count)


def logprobs_workspace(
    max_samples: int,
    vocabulary_size: int,
    top: int,
    device: torch.device | str,
    piece: int = _PIECE,
) -> LogprobsWorkspace:
    """Room for `max_samples` samples with `top` likeliest ids, at most MOST. `piece`: ids of one
    program; a power of 2. Raises ValueError for a `top` outside 1..MOST."""
    if not 1 <= top <= MOST:
        raise ValueError(f"top {top} is not within 1 and {MOST}")
    splits = triton.cdiv(vocabulary_size, piece)

    def room(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(max_samples, splits, *shape, dtype=dtype, device=device)

    return LogprobsWorkspace(
        piece, room(top, dtype=torch.int64), room(dtype=torch.int64), room(dtype=torch.int32)
    )


def top_logprobs(
    logits: torch.Tensor,
    columns: SampleColumns,
    vocabulary_size: int,
    token_ids: torch.Tensor,
    out: TopLogprobs,
    workspace: LogprobsWorkspace,
) -> None:
    """Logprobs of token_ids int32 [S], of samples that ask for them and have one (not -1).

    logits float32 or bfloat16 [L, >= vocabulary_size]. A sample gets as many of the likeliest as
    its column `logprobs` says, at most the workspace's `top`, which out.top_ids has columns for.
    """
    samples, splits = len(columns.rows), workspace.candidates.shape[1]
    if not samples:
        return
    top, grid = workspace.candidates.shape[2], (samples, splits)
    of_rows = (columns.rows, columns.params, token_ids)
    row = (logits, logits.stride(0), vocabulary_size, *of_rows)
    padded = {"SPLITS": triton.next_power_of_2(splits), "TOP": top}
    # Nothing fused: distances are those of the reference.
    exact = {"num_warps": _WARPS, "enable_fp_fusion": False}
    candidates_kernel[grid](
        *row, workspace.candidates, splits, PIECE=workspace.piece, TOP=top, **exact
    )
    masses_kernel[grid](
        *row, workspace.candidates, workspace.masses, workspace.closer, splits,
        PIECE=workspace.piece, TILE=min(_TILE, workspace.piece), **padded, **exact,
    )  # fmt: skip
    logprobs_kernel[(samples,)](
        logits, logits.stride(0), *of_rows,
        workspace.candidates, workspace.masses, workspace.closer,
        out.logprobs, out.ranks, out.top_counts, out.top_ids, out.top_logprobs,
        out.top_ids.stride(0), splits,
        PLACES=triton.next_power_of_2(top), **padded, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


_TYPES = {
    "row_stride": "i32", "vocabulary": "i32", "splits": "i32", "top_stride": "i32",
    "candidates": "*i64", "sums": "*i64", "logprobs": "*fp32", "top_logprobs": "*fp32",
}  # fmt: skip


def variants() -> Iterator[Variant]:
    """For vocabularies of 64k to 128k, and 20 of the likeliest."""
    merged: dict[str, object] = {"SPLITS": 32, "TOP": 20}
    kernels: tuple[tuple[Kernel, dict[str, object], int], ...] = (
        (candidates_kernel, {"PIECE": _PIECE, "TOP": 20}, _WARPS),
        (masses_kernel, merged | {"PIECE": _PIECE, "TILE": _TILE}, _WARPS),
        (logprobs_kernel, merged | {"PLACES": 32}, 4),
    )
    for dtype in ("fp32", "bf16"):
        for kernel, constants, warps in kernels:
            names = [name for name in kernel.arg_names if name not in constants]
            types = {"logits": f"*{dtype}"} | _TYPES
            yield Variant(
                dtype, kernel, {name: types.get(name, "*i32") for name in names}, constants,
                aligned=frozenset({"row_stride", "vocabulary"} & {*names}),
                num_warps=warps, fp_fusion=False,
            )  # fmt: skip
