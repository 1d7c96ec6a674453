"""Token ids that stand for what the step before drew, filled in on the device."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from triptych.kernels.triton.variants import Variant

_BLOCK = 256
_FIRST = -2  # engine_core.layout.PREVIOUS_SAMPLE, which kernels do not import


@triton.jit(do_not_specialize=["size", "num_previous"])  # they differ from step to step
def _resolve_kernel(
    token_ids, previous, size, num_previous, FIRST: tl.constexpr, BLOCK: tl.constexpr
):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    within = lanes < size
    ids = tl.load(token_ids + lanes, mask=within, other=0)
    sample = FIRST - ids
    named = within & (sample >= 0) & (sample < num_previous)
    drawn = tl.load(previous + sample, mask=named, other=0)
    # A sample without a token (-1) has no sequence left: what is computed for it is thrown away.
    tl.store(token_ids + lanes, tl.maximum(drawn, 0), mask=named)


def resolve_tokens(token_ids: torch.Tensor, previous: torch.Tensor) -> None:
    """Replace each id PREVIOUS_SAMPLE - i (<= -2) by previous[i], in place; others stay.

    token_ids int32 [T], previous int32 [S]. Where nothing was drawn (-1) the id becomes 0; ids that
    name no sample of `previous` stay. Twin: `kernels.reference.token_sources`.
    """
    size = token_ids.numel()
    if size:
        _resolve_kernel[(triton.cdiv(size, _BLOCK),)](
            token_ids, previous, size, previous.numel(), FIRST=_FIRST, BLOCK=_BLOCK
        )


def variants() -> Iterator[Variant]:
    """What the launcher uses."""
    arguments = {"token_ids": "*i32", "previous": "*i32", "size": "i32", "num_previous": "i32"}
    yield Variant("i32", _resolve_kernel, arguments, {"FIRST": _FIRST, "BLOCK": _BLOCK})
