"""The text-level half of a raw request, checked: what becomes of the sampled tokens.

Every refusal is an InvalidRequest named as on the wire.
"""

from collections.abc import Sequence

from triptych.engine_core.errors import InvalidRequest
from triptych.services.tokenizer.sampling_validation import (
    ALL_LOGPROBS,
    choices_wished,
    wished_logprobs,
)
from triptych.services.tokenizer.validation import OutputParams, ServedModel
from triptych.v1 import common_pb2, inference_pb2

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 1024
MAX_HELD = 1 << 22
"""Tokens with their alternatives that one request may have held back (best_of), and alternatives
that one prompt may have."""
MAX_STEP = MAX_HELD // 8
"""Alternatives that one step may bring for all choices of a request, so that several fit unread."""


def output_params(
    raw: common_pb2.SamplingParams,
    output_format: int,
    model: ServedModel,
    max_unread_tokens: int,
    *,
    echo: bool = False,
) -> OutputParams:
    """What the client wants to see. Raises InvalidRequest."""
    _check_stop_strings(raw.stop)
    if output_format not in inference_pb2.OutputFormat.values():
        known = ", ".join(str(value) for value in inference_pb2.OutputFormat.values())
        raise InvalidRequest("output_format", f"{output_format} is none of {known}")
    eos = () if raw.ignore_eos else model.eos_token_ids
    ends = end_token_ids(raw, model) if raw.HasField("structured_output") else None
    n, best_of = choices_wished(raw)
    return OutputParams(
        stop=tuple(dict.fromkeys(raw.stop)),
        stop_token_ids=frozenset(raw.stop_token_ids) - frozenset(eos),
        end_token_ids=ends,
        include_stop=raw.include_stop_str_in_output,
        skip_special_tokens=(
            raw.skip_special_tokens if raw.HasField("skip_special_tokens") else True
        ),
        min_tokens=raw.min_tokens,
        text=output_format != inference_pb2.OUTPUT_FORMAT_TOKEN_IDS,
        token_ids=output_format != inference_pb2.OUTPUT_FORMAT_TEXT,
        max_unread_tokens=max_unread_tokens,
        n=n,
        best_of=best_of,
        logprobs=wished_logprobs(raw, "logprobs", model),
        prompt_logprobs=wished_logprobs(raw, "prompt_logprobs", model),
        echo=echo,
    )


def end_token_ids(raw: common_pb2.SamplingParams, model: ServedModel) -> frozenset[int]:
    """The tokens that only end a text, where a grammar may end it with another."""
    return frozenset((*raw.stop_token_ids, *model.eos_token_ids))


def check_held(
    output: OutputParams, model: ServedModel, prompt_tokens: int, max_tokens: int
) -> None:
    """Bounds of what is kept in memory for one request. Raises InvalidRequest."""

    def alternatives(wished: int | None) -> int:
        return model.vocabulary_size if wished == ALL_LOGPROBS else wished or 0

    kept = output.best_of * max_tokens * (1 + alternatives(output.logprobs))
    if output.held and kept > MAX_HELD:
        raise InvalidRequest(
            "sampling_params.best_of",
            f"best_of {output.best_of} x max_tokens {max_tokens} with their alternatives makes"
            f" {kept} tokens to hold back, more than {MAX_HELD}",
        )
    step = output.best_of * alternatives(output.logprobs)
    if step > MAX_STEP:
        raise InvalidRequest(
            "sampling_params.logprobs",
            f"{output.best_of} choices make {step} alternatives a step, more than {MAX_STEP}",
        )
    echoes = output.n if output.echo else 0  # each choice begins with the prompt
    for field, wished, times in (
        ("prompt_logprobs", output.prompt_logprobs, 1),
        ("logprobs", output.logprobs, echoes),
    ):
        asked = prompt_tokens * alternatives(wished) * times
        if asked > MAX_HELD:
            raise InvalidRequest(
                f"sampling_params.{field}",
                f"a prompt of {prompt_tokens} tokens makes {asked} alternatives,"
                f" more than {MAX_HELD}",
            )


def _check_stop_strings(stop: Sequence[str]) -> None:
    field = "sampling_params.stop"
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(field, f"{len(stop)} strings, more than {MAX_STOP_STRINGS}")
    for index, text in enumerate(stop):
        size = len(text.encode())
        if not 1 <= size <= MAX_STOP_STRING_BYTES:
            raise InvalidRequest(
                f"{field}[{index}]",
                f"{size} bytes is not within 1 and {MAX_STOP_STRING_BYTES}",
            )
