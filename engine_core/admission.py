"""May this request ever run? What can never fit is refused at once, naming field, value and bound.

One rule for lengths, everywhere: prompt + output <= max_model_len, at every moment. A request asks
for prompt + max_tokens, and that must fit the whole KV pool: alone, it never runs out of blocks.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields

from triptych.engine_core.errors import InvalidRequest, QueueFull, TooLong
from triptych.engine_core.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one scheduler. Raises ValueError naming the field whose value cannot work."""

    max_model_len: int  # prompt + output tokens of a sequence
    max_num_seqs: int  # sequences of a step
    max_num_batched_tokens: int  # tokens of a step
    max_num_waiting: int  # requests beyond those that max_num_seqs lets run
    vocabulary_size: int  # rows of the logits: token ids are below
    sampleable_vocabulary: int  # ids at or above are never drawn (padding of the logits)

    def __post_init__(self) -> None:
        for field in fields(self):
            least = {"max_num_waiting": 0, "max_model_len": 2}.get(field.name, 1)
            if (value := getattr(self, field.name)) < least:
                raise ValueError(f"{field.name}: {value} is below {least}")
        # Every running sequence gets a token in every step: that is what excludes starvation.
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens: {self.max_num_batched_tokens} is below"
                f" max_num_seqs {self.max_num_seqs}"
            )
        if self.sampleable_vocabulary > self.vocabulary_size:
            raise ValueError(
                f"sampleable_vocabulary: {self.sampleable_vocabulary} is above"
                f" vocabulary_size {self.vocabulary_size}"
            )


def max_sequence_len(max_model_len: int, num_blocks: int, block_size: int) -> int:
    """The longest prompt + output that both the context and the whole pool take."""
    return min(max_model_len, num_blocks * block_size)


def check_request(request: Request, limits: Limits, num_blocks: int, block_size: int) -> None:
    """Raise InvalidRequest or TooLong if the request can never run, however empty the engine."""
    _check_lengths(request, limits.max_model_len, num_blocks, block_size)
    _check_ids("prompt", request.prompt_token_ids, limits.vocabulary_size)
    _check_ids("output_token_ids", request.output_token_ids, limits.vocabulary_size)
    _check_ids("stop_token_ids", request.params.stop_token_ids, limits.vocabulary_size)
    _check_something_to_draw(request, limits.sampleable_vocabulary)


def check_queue(num_requests: int, limits: Limits) -> None:
    """Raise QueueFull if `num_requests` unfinished ones are all that the limits allow."""
    bound = limits.max_num_seqs + limits.max_num_waiting
    if num_requests >= bound:
        raise QueueFull(
            f"{num_requests} requests are running or waiting, the bound is {bound}"
            f" (max_num_seqs {limits.max_num_seqs} + max_num_waiting {limits.max_num_waiting})"
        )


def _check_lengths(request: Request, max_model_len: int, num_blocks: int, block_size: int) -> None:
    prompt, max_tokens = len(request.prompt_token_ids), request.params.max_tokens
    asked = f"prompt of {prompt} tokens and max_tokens {max_tokens}"
    if prompt >= max_model_len:
        raise TooLong("prompt", f"{asked}: the prompt must be shorter than {max_model_len} tokens")
    if prompt + max_tokens > max_model_len:
        raise TooLong(
            "max_tokens", f"{asked} make {prompt + max_tokens}, above max_model_len {max_model_len}"
        )
    if prompt + max_tokens > num_blocks * block_size:
        raise TooLong(
            "max_tokens",
            f"{asked} make {prompt + max_tokens}, above the {num_blocks * block_size} tokens that"
            f" the KV cache holds ({num_blocks} blocks of {block_size})",
        )


def _check_ids(field: str, token_ids: Iterable[int], vocabulary_size: int) -> None:
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocabulary_size:
            raise InvalidRequest(
                field,
                f"token id {token_id} at index {index} is not within 0 and {vocabulary_size - 1}",
            )


def _check_something_to_draw(request: Request, sampleable_vocabulary: int) -> None:
    params = request.params
    stops = {token_id for token_id in params.stop_token_ids if token_id < sampleable_vocabulary}
    if params.min_tokens > 0 and len(stops) == sampleable_vocabulary:
        raise InvalidRequest(
            "stop_token_ids",
            f"they are all {sampleable_vocabulary} tokens, so min_tokens {params.min_tokens}"
            " leaves none to draw",
        )
