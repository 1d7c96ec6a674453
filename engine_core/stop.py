"""Where a sequence ends, judged by token ids alone. Stop strings are the tokenizer's business."""

from triptych.engine_core.sampling_params import SamplingParams
from triptych.engine_core.step import FinishReason


def finish_reason(
    params: SamplingParams, token_id: int, num_output: int, room: int
) -> FinishReason | None:
    """Why the sequence ends with `token_id`, its `num_output`-th output token; None if it goes on.

    `room` is how many tokens the context still takes after this one. A stop id on the last allowed
    token is a STOP: the text is complete.
    """
    if token_id in params.stop_token_ids:
        return FinishReason.STOP
    if num_output >= params.max_tokens or room <= 0:
        return FinishReason.LENGTH
    return None


def banned_token_ids(params: SamplingParams, num_output: int) -> tuple[int, ...]:
    """Ids not to be drawn after `num_output` output tokens: the stop ids until min_tokens."""
    return params.stop_token_ids if num_output < params.min_tokens else ()
