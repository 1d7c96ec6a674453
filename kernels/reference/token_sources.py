"""Ids that stand for what the step before drew. Contract: `triptych.kernels.ops.TOKEN_SOURCES`."""

import torch

PREVIOUS_SAMPLE = -2


def resolve_tokens(token_ids: torch.Tensor, previous: torch.Tensor) -> None:
    """Replace each id PREVIOUS_SAMPLE - i (<= -2) by previous[i], in place; others stay.

    token_ids int32 [T], previous int32 [S]. Where nothing was drawn (-1) the id becomes 0; ids that
    name no sample of `previous` stay.
    """
    samples = PREVIOUS_SAMPLE - token_ids
    named = (samples >= 0) & (samples < previous.numel())
    token_ids[named] = previous[samples[named].long()].clamp(min=0)
