"""May this request ever run? What can never fit is refused at once, naming field, value and bound.

One rule for lengths, everywhere: prompt + output <= max_model_len, at every moment. A request asks
for prompt + max_tokens, and that must fit the whole KV pool: alone, it never runs out of blocks.
"""

from collections.abc import Collection
from dataclasses import dataclass, fields

from triptych.engine_core.errors import InvalidRequest, QueueFull, TooLong
from triptych.engine_core.request import Request
from triptych.engine_core.sampling_params import BeamParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one scheduler. Raises ValueError naming the field whose value cannot work."""

    max_model_len: int  # prompt + output tokens of a sequence
    max_num_seqs: int  # sequences of a step
    max_num_batched_tokens: int  # tokens of a step
    max_num_waiting: int  # requests beyond those that max_num_seqs lets run
    vocabulary_size: int  # rows of the logits: token ids are below
    sampleable_vocabulary: int  # ids at or above are never drawn (padding of the logits)
    max_num_logits: int  # logits rows of a step
    long_prefill_token_threshold: int = 0  # tokens of one sequence in a step; 0: the whole step's
    watermark_blocks: int = 0  # left free when a sequence starts beside others
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        least = {
            "max_num_waiting": 0, "max_model_len": 2,
            "long_prefill_token_threshold": 0, "watermark_blocks": 0, "prefix_caching": 0,
        }  # fmt: skip
        for field in fields(self):
            if (value := getattr(self, field.name)) < least.get(field.name, 1):
                raise ValueError(f"{field.name}: {value} is below {least.get(field.name, 1)}")
        # Every running sequence gets a token in every step: that is what excludes starvation.
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens: {self.max_num_batched_tokens} is below"
                f" max_num_seqs {self.max_num_seqs}"
            )
        if self.max_num_logits < self.max_num_seqs:
            raise ValueError(
                f"max_num_logits: {self.max_num_logits} is below max_num_seqs {self.max_num_seqs}"
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
    # Logprobs are of ids that can be drawn; logits may have more rows.
    scored = request.params.prompt_logprobs >= 0
    known = limits.sampleable_vocabulary if scored else limits.vocabulary_size
    _check_ids("prompt", request.prompt_token_ids, known)
    _check_ids("output_token_ids", request.output_token_ids, limits.vocabulary_size)
    params, size = request.params, limits.vocabulary_size
    _check_ids("stop_token_ids", params.stop_token_ids, size)
    _check_ids("logit_bias", [token_id for token_id, _ in params.logit_bias], size)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), size)
    for index, word in enumerate(params.bad_words):
        _check_ids(f"bad_words[{index}]", word, size)
    _check_something_to_draw(request, limits.sampleable_vocabulary)
    if params.beam is not None:
        _check_beams(request, params.beam, limits, num_blocks, block_size)


def check_queue(num_requests: int, num_new: int, limits: Limits) -> None:
    """Raise QueueFull if `num_new` choices more than `num_requests` are more than may wait."""
    bound = limits.max_num_seqs + limits.max_num_waiting
    if num_requests + num_new > bound:
        raise QueueFull(
            f"{num_requests} requests are running or waiting, the bound is {bound}"
            f" (max_num_seqs {limits.max_num_seqs} + max_num_waiting {limits.max_num_waiting})"
        )


def _check_beams(
    request: Request, beam: BeamParams, limits: Limits, num_blocks: int, block_size: int
) -> None:
    if request.params.prompt_logprobs >= 0:
        raise InvalidRequest("prompt_logprobs", "not together with beam search")
    if beam.width > limits.max_num_seqs:
        raise InvalidRequest(
            "beam_width", f"{beam.width} is above max_num_seqs {limits.max_num_seqs}"
        )
    # All beams may run at once; they share the prompt's blocks but for the last.
    prompt = -(-len(request.prompt_token_ids) // block_size)
    each = -(-request.params.max_tokens // block_size) + 1
    if prompt + beam.width * each > num_blocks:
        raise TooLong(
            "beam_width",
            f"{beam.width} beams of {request.params.max_tokens} tokens behind a prompt of"
            f" {len(request.prompt_token_ids)} need {prompt + beam.width * each} blocks of"
            f" {block_size}, the KV cache has {num_blocks}",
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


def _check_ids(field: str, token_ids: Collection[int], vocabulary_size: int) -> None:
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocabulary_size):
        return  # a walk over a long prompt in Python costs several times as much
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocabulary_size:
            raise InvalidRequest(
                field,
                f"token id {token_id} at index {index} is not within 0 and {vocabulary_size - 1}",
            )


def _check_something_to_draw(request: Request, sampleable_vocabulary: int) -> None:
    params = request.params
    stops = {token_id for token_id in params.stop_token_ids if token_id < sampleable_vocabulary}
    if params.allowed_token_ids is not None:
        banned = {word[0] for word in params.bad_words if len(word) == 1}
        allowed = {each for each in params.allowed_token_ids if each < sampleable_vocabulary}
        allowed -= banned
        if not allowed - (stops if params.min_tokens > 0 else set()):
            raise InvalidRequest(
                "allowed_token_ids",
                f"none of the {len(params.allowed_token_ids)} ids can be drawn"
                + (f" before min_tokens {params.min_tokens}" if allowed else ""),
            )
    elif params.min_tokens > 0 and len(stops) == sampleable_vocabulary:
        raise InvalidRequest(
            "stop_token_ids",
            f"they are all {sampleable_vocabulary} tokens, so min_tokens {params.min_tokens}"
            " leaves none to draw",
        )
