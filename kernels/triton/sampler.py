"""Tokens for the samples of a step, drawn on the device: those of `kernels.reference.sampler`.

docs/sampling.md says what is computed. Every sample is on its own, and its row is cut into pieces
of a fixed size, so a token never depends on what else is in the step. The launches, in order; all
exit at once where a sample does not need them, and none needs the host to know anything:

    count    history -> how often each id occurred       (penalties)
    peaks    the largest logit; is the row broken?
    search   8 times for top_k, 8 times for top_p        (top_k, top_p)
    ties     how many ids lie just on the cut            (top_k, top_p)
    scores   Gumbel noise minus distance                 (noise)
    tokens   the best of all pieces
    count    the counts are set back to 0                (penalties)
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

import torch
import triton

from triptych.kernels.triton.sampler_draw import (
    count_kernel,
    peaks_kernel,
    scores_kernel,
    ties_kernel,
    tokens_kernel,
)
from triptych.kernels.triton.sampler_search import PASSES, PIVOTS, STATE, search_kernel
from triptych.kernels.triton.variants import Kernel, Variant

PIECE = 8192
_TILE = 1024
_SEARCH_TILE = {0: 512, 1: 256}  # of counts and of masses: PIVOTS sums for each lane
_QUADS = 128
_HISTORY_BLOCK, _HISTORY_PROGRAMS = 256, 8
_WARPS = 8


class SampleColumns(Protocol):
    """int32 columns of S samples, as `engine_core.layout.StepLayout` has them.

    rows [S], -1 where nothing is to be drawn; params [S, NUM_COLUMNS]; history_starts [S + 1];
    history_prompts [S]; history, of the samples with penalties, ids outside the vocabulary ignored.
    """

    @property
    def rows(self) -> torch.Tensor:
        """Of logits."""

    @property
    def params(self) -> torch.Tensor:
        """Parameters."""

    @property
    def history_starts(self) -> torch.Tensor:
        """Where each sample's history starts."""

    @property
    def history_prompts(self) -> torch.Tensor:
        """How much of it is prompt."""

    @property
    def history(self) -> torch.Tensor:
        """Tokens of prompts and outputs."""


class Features(NamedTuple):
    """What samples of a step may ask for; launches for what none asks for are left out.

    A sample that asks for more than is launched gets a wrong token: all True is always right. The
    kernels are the same whatever is asked for. `noise`: temperatures above 0.
    """

    noise: bool = True
    top_k: bool = True
    top_p: bool = True
    penalties: bool = True


class SamplerWorkspace(NamedTuple):
    """Scratch memory for a number of samples; made by `sampler_workspace`. `counts` is 0 between
    steps."""

    vocabulary: int
    piece: int
    counts: torch.Tensor
    peaks: torch.Tensor
    states: torch.Tensor
    sums: torch.Tensor
    cuts: torch.Tensor
    ties: torch.Tensor
    scores: torch.Tensor
    best_ids: torch.Tensor


def sampler_workspace(
    max_samples: int, vocabulary_size: int, device: torch.device | str, piece: int = PIECE
) -> SamplerWorkspace:
    """Room for up to `max_samples` samples: 4 bytes per sample and id, and little beside it.

    `piece`: ids that one program looks at; a power of 2.
    """
    splits = triton.cdiv(vocabulary_size, piece)

    def room(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(max_samples, *shape, dtype=dtype, device=device)

    return SamplerWorkspace(
        vocabulary_size,
        piece,
        counts=room(vocabulary_size, dtype=torch.int32),
        peaks=room(splits, dtype=torch.int64),
        states=room(2, PASSES, STATE, dtype=torch.int64),
        sums=room(2, PASSES, PIVOTS, dtype=torch.int64),
        cuts=room(2, dtype=torch.int64),
        ties=room(splits, dtype=torch.int32),
        scores=room(splits, dtype=torch.float64),
        best_ids=room(splits, dtype=torch.int32),
    )


def sample(
    logits: torch.Tensor,
    columns: SampleColumns,
    vocabulary_size: int,
    out: torch.Tensor,
    workspace: SamplerWorkspace,
    features: Features = Features(),  # noqa: B008 - a value
) -> None:
    """Draw out int32 [S] from logits float32 or bfloat16 [L, >= vocabulary_size].

    -1 where a row is -1, its logits are not finite, or nothing can be drawn. Several samples may
    share a row. The launches depend on `features` and on shapes only; S may be below what the
    workspace has room for. Raises ValueError where it has none.
    """
    samples = len(columns.rows)
    if samples > len(workspace.peaks) or vocabulary_size != workspace.vocabulary:
        raise ValueError(
            f"{samples} samples of {vocabulary_size} ids, the workspace is for "
            f"{len(workspace.peaks)} of {workspace.vocabulary}"
        )
    if samples:
        _launch(logits, columns, out, workspace, features)


def _launch(
    logits: torch.Tensor,
    columns: SampleColumns,
    out: torch.Tensor,
    room: SamplerWorkspace,
    features: Features,
) -> None:
    rows, params = columns.rows, columns.params
    samples, splits = len(rows), room.peaks.shape[1]
    grid, tile = (samples, splits), min(_TILE, room.piece)
    row = (logits, logits.stride(0), room.vocabulary, rows, params, room.counts)
    pieces = {"PIECE": room.piece}
    padded = {"SPLITS": triton.next_power_of_2(splits)}
    # Fused multiplications and additions would round otherwise than the reference.
    exact = {"num_warps": _WARPS, "enable_fp_fusion": False}
    top_ks, top_ps = features.noise and features.top_k, features.noise and features.top_p

    def count(clear: bool) -> None:
        count_kernel[(samples, _HISTORY_PROGRAMS)](
            rows, params, columns.history_starts, columns.history_prompts, columns.history,
            room.counts, room.vocabulary, _HISTORY_PROGRAMS, BLOCK=_HISTORY_BLOCK, CLEAR=clear,
        )  # fmt: skip

    if features.penalties:
        count(clear=False)
    peaks_kernel[grid](*row, room.peaks, room.sums, splits, TILE=tile, **pieces, **exact)
    for mass, wanted in ((0, top_ks), (1, top_ps)):
        for step in range(PASSES if wanted else 0):
            search_kernel[grid](
                *row, room.peaks, room.states, room.sums, splits, step,
                TILE=min(_SEARCH_TILE[mass], tile), MASS=mass,
                **padded, **pieces, **exact,
            )  # fmt: skip
    if top_ks or top_ps:
        ties_kernel[grid](
            *row, room.peaks, room.states, room.sums, room.cuts, room.ties, splits,
            TILE=tile, **padded, **pieces, **exact,
        )  # fmt: skip
    if features.noise:
        scores_kernel[grid](
            *row, room.peaks, room.cuts, room.ties, room.scores, room.best_ids, splits,
            QUADS=min(_QUADS, tile // 4), **padded, **pieces, **exact,
        )  # fmt: skip
    tokens_kernel[(samples,)](
        rows, params, room.peaks, room.scores, room.best_ids, out, splits,
        **padded, num_warps=1,
    )  # fmt: skip
    if features.penalties:
        count(clear=True)


_TYPES = {
    "row_stride": "i32", "vocabulary": "i32", "rows": "*i32", "params": "*i32", "counts": "*i32",
    "peaks": "*i64", "states": "*i64", "sums": "*i64", "cuts": "*i64", "ties": "*i32",
    "scores": "*fp64", "best_ids": "*i32", "splits": "i32", "step": "i32", "out": "*i32",
    "history_starts": "*i32", "history_prompts": "*i32", "history": "*i32", "programs": "i32",
}  # fmt: skip
_ARGUMENTS = {
    count_kernel: "rows params history_starts history_prompts history counts vocabulary programs",
    peaks_kernel: "logits row_stride vocabulary rows params counts peaks sums splits",
    search_kernel: "logits row_stride vocabulary rows params counts peaks states sums splits step",
    ties_kernel: (
        "logits row_stride vocabulary rows params counts peaks states sums cuts ties splits"
    ),
    scores_kernel: (
        "logits row_stride vocabulary rows params counts peaks cuts ties scores best_ids splits"
    ),
    tokens_kernel: "rows params peaks scores best_ids out splits",
}


def variants() -> Iterator[Variant]:
    """What the launcher uses, for vocabularies of 64k to 128k."""
    splits = {"SPLITS": 16}
    yield _variant(tokens_kernel, "", splits, warps=1)
    for clear in (False, True):
        yield _variant(count_kernel, f"clear={clear}", {"BLOCK": _HISTORY_BLOCK, "CLEAR": clear})
    for dtype in ("fp32", "bf16"):
        for kernel, name, constants in (
            (peaks_kernel, "", {"TILE": _TILE}),
            (search_kernel, ",top_k", splits | {"MASS": 0, "TILE": _SEARCH_TILE[0]}),
            (search_kernel, ",top_p", splits | {"MASS": 1, "TILE": _SEARCH_TILE[1]}),
            (ties_kernel, "", splits | {"TILE": _TILE}),
            (scores_kernel, "", splits | {"QUADS": _QUADS}),
        ):
            yield _variant(kernel, dtype + name, {**constants, "PIECE": PIECE}, logits=dtype)


def _variant(
    kernel: Kernel,
    name: str,
    constants: Mapping[str, object],
    *,
    logits: str = "fp32",
    warps: int = _WARPS,
) -> Variant:
    types = _TYPES | {"logits": f"*{logits}"}
    arguments = {argument: types[argument] for argument in _ARGUMENTS[kernel].split()}
    return Variant(
        name, kernel, arguments, constants,
        aligned=frozenset({"row_stride", "vocabulary"}) & arguments.keys(),
        num_warps=warps, fp_fusion=False,
        # With Triton 3.6, around the call for the slow path of an exact division.
        max_spills=16 if kernel is search_kernel else 0,
    )  # fmt: skip
