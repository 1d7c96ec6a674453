"""The sampling fields that completions and chat share, as OpenAI and vLLM spell them."""

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from triptych.engine_core.errors import InvalidRequest
from triptych.engine_core.sampling_params import MAX_LOGIT_BIASES
from triptych.services.tokenizer.openai_http.body import Body
from triptych.v1 import common_pb2, inference_pb2

_TOKEN_ID = re.compile(r"[0-9]{1,10}")
_SAME = (
    "min_tokens", "temperature", "top_k", "top_p", "min_p", "typical_p", "top_n_sigma",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size", "n",
    "ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
)  # fmt: skip
_EARLY = {
    False: common_pb2.EARLY_STOPPING_FALSE,
    True: common_pb2.EARLY_STOPPING_TRUE,
    "never": common_pb2.EARLY_STOPPING_NEVER,
}


def _few(value: object) -> object:
    """Before every entry is looked at."""
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIASES:
        raise ValueError(f"{len(value)} entries, more than {MAX_LOGIT_BIASES}")
    return value


Ids = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]


class StreamOptions(Body):
    """What a stream carries beside its pieces."""

    include_usage: bool | None = Field(
        default=None, description="one more chunk before the end, with the usage of the request"
    )


class SamplingFields(Body):
    """How tokens are drawn, and what the request is for the scheduler. null: the default."""

    model: str | None = Field(default=None, description="absent: the one model that is served")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | Texts | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(_few)] | None = None
    allowed_token_ids: Ids | None = None
    bad_words: Texts | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    prompt_logprobs: int | None = None
    return_tokens_as_token_ids: bool | None = Field(
        default=None, description="in logprobs, name tokens token_id:N"
    )
    return_token_ids: bool | None = Field(
        default=None, description="put each choice's token ids beside its text"
    )
    user: str | None = Field(default=None, description="who asks, for the fair scheduling policy")
    request_id: str | None = Field(default=None, description="a label for the logs")
    cache_salt: str | None = None
    priority: int | None = Field(default=None, description="lower runs first")
    queue_timeout_ms: int | None = None
    timeout_ms: int | None = None


def check_stream(fields: SamplingFields) -> None:
    """Raises InvalidRequest for options of a stream that is none."""
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequest("stream_options", "only with stream true")
    if fields.stream and fields.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs", "not with stream true")


def fill_sampling(fields: SamplingFields, params: common_pb2.SamplingParams) -> None:
    """Set what the fields say. Raises InvalidRequest for what the message cannot hold."""
    for name in _SAME:
        put(params, name, getattr(fields, name))
    put(params, "prompt_logprobs", fields.prompt_logprobs)
    if fields.seed is not None:
        if not -(1 << 63) <= fields.seed < 1 << 64:
            raise InvalidRequest("seed", f"{fields.seed} is no 64-bit number")
        params.seed = fields.seed % (1 << 64)
    stop = [fields.stop] if isinstance(fields.stop, str) else fields.stop
    extend(params, "stop", stop)
    extend(params, "stop_token_ids", fields.stop_token_ids)
    extend(params, "bad_words", fields.bad_words)
    for key, bias in (fields.logit_bias or {}).items():
        if not _TOKEN_ID.fullmatch(key) or int(key) >= 1 << 32:
            raise InvalidRequest("logit_bias", f"{key!r:.40} is no token id")
        params.logit_bias[int(key)] = bias
    if fields.allowed_token_ids is not None:
        params.allowed_token_ids.SetInParent()
        extend(params.allowed_token_ids, "ids", fields.allowed_token_ids, "allowed_token_ids")
    if fields.use_beam_search:
        _beam(fields, params)


def fill_routing(
    fields: SamplingFields,
    request: inference_pb2.GenerateRequest | inference_pb2.ChatRequest,
    label: str,
) -> None:
    """The request's labels and limits. `label` counts where the body has no request_id."""
    request.model = fields.model or ""
    request.request_id = label if fields.request_id is None else fields.request_id
    request.cache_salt = fields.cache_salt or ""
    request.tenant = fields.user or ""
    for name in ("priority", "queue_timeout_ms", "timeout_ms"):
        put(request, name, getattr(fields, name))


def put(
    message: (
        common_pb2.SamplingParams
        | common_pb2.BeamSearch
        | inference_pb2.GenerateRequest
        | inference_pb2.ChatRequest
    ),
    name: str,
    value: object,
    field: str = "",
) -> None:
    """Set a scalar unless it is None. Raises InvalidRequest for a number that does not fit."""
    if value is None:
        return
    try:
        setattr(message, name, value)
    except (ValueError, OverflowError):  # protobuf's words name neither field nor bound
        raise InvalidRequest(field or name, f"{value!r:.40} is out of range") from None


def extend(
    message: common_pb2.SamplingParams | common_pb2.TokenIds,
    name: str,
    values: list[int] | list[str] | None,
    field: str = "",
) -> None:
    """Append to a repeated field. Raises InvalidRequest that names the wrong entry."""
    into = getattr(message, name)
    try:
        into.extend(values or ())
    except (ValueError, OverflowError):
        for index, value in enumerate(values or ()):
            try:
                into.append(value)
            except (ValueError, OverflowError):
                raise InvalidRequest(
                    f"{field or name}[{index}]", f"{value!r:.40} is out of range"
                ) from None


def _beam(fields: SamplingFields, params: common_pb2.SamplingParams) -> None:
    """As vLLM: `best_of`, else `n`, is the width."""
    best_of = getattr(fields, "best_of", None)
    width = best_of if isinstance(best_of, int) else fields.n
    field = "n" if best_of is None else "best_of"
    put(params.beam, "width", 1 if width is None else width, field)
    put(params.beam, "length_penalty", fields.length_penalty)
    if fields.early_stopping is not None:
        params.beam.early_stopping = _EARLY[fields.early_stopping]


NAMES: Mapping[str, str] = {"tenant": "user", "beam": "n", "structured_output": "response_format"}
"""What is called otherwise than in gRPC."""
