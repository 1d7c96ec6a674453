"""Stage messages to engine_core values and back: total, and tested both ways.

Total: every message of a peer gives a value or raises InvalidRequest, nothing else. The bounds of
the values themselves are checked by the values (SamplingParams, Request). What a step brought is in
step_outputs.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Final

from triptych.engine_core.errors import (
    RETRY_AFTER_MS,
    DeadlinePassed,
    FatalRequest,
    InvalidRequest,
    NotFinite,
    QueueFull,
    RequestError,
    TooLong,
    Unavailable,
)
from triptych.engine_core.ids import RequestId
from triptych.engine_core.request import Request
from triptych.engine_core.sampling_params import (
    MAX_CHOICES,
    NO_LOGPROBS,
    BeamParams,
    EarlyStopping,
    ExternalSampler,
    SamplingParams,
)
from triptych.v1 import common_pb2, stage_pb2

MAX_LABEL_BYTES = 128

EARLY_STOPPING: Final[Mapping[int, EarlyStopping]] = {
    common_pb2.EARLY_STOPPING_UNSPECIFIED: "false",
    common_pb2.EARLY_STOPPING_FALSE: "false",
    common_pb2.EARLY_STOPPING_TRUE: "true",
    common_pb2.EARLY_STOPPING_NEVER: "never",
}
_EARLY_STOPPING_NUMBERS = {
    "false": common_pb2.EARLY_STOPPING_FALSE,
    "true": common_pb2.EARLY_STOPPING_TRUE,
    "never": common_pb2.EARLY_STOPPING_NEVER,
}


def pack_u32(values: Sequence[int]) -> bytes:
    """A column of u32, little-endian. Raises InvalidRequest for a value that is none."""
    try:
        return struct.pack(f"<{len(values)}I", *values)
    except struct.error as error:
        raise InvalidRequest("token_ids", "a token id is not an unsigned 32-bit number") from error


def unpack_u32(column: bytes, field: str) -> tuple[int, ...]:
    """The u32 values of a column. Raises InvalidRequest naming `field` on a torn one."""
    if len(column) % 4:
        raise InvalidRequest(field, f"{len(column)} bytes are not a whole number of u32")
    return struct.unpack(f"<{len(column) // 4}I", column)


# ------------------------------------------------------------------------------------------ Submit


def submit_of(prompt: bytes, params: SamplingParams, label: str = "") -> stage_pb2.Submit:
    """The message for a new request; its slot is chosen by whoever sends it.

    `prompt` is a column of u32, little-endian; `label` is for logs.
    """
    return stage_pb2.Submit(
        request_id=label, prompt_token_ids=prompt, params=sequence_params_of(params)
    )


def sequence_params_of(params: SamplingParams) -> stage_pb2.SequenceParams:
    """The parameters as a message. Raises InvalidRequest for an id that is no u32."""
    message = stage_pb2.SequenceParams(
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
        stop_token_ids=params.stop_token_ids,
        typical_p=params.typical_p,
        top_n_sigma=params.top_n_sigma,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        no_repeat_ngram_size=params.no_repeat_ngram_size,
        logit_bias_ids=pack_u32([token_id for token_id, _ in params.logit_bias]),
        logit_bias_values=_pack_f32([bias for _, bias in params.logit_bias]),
        allowed_token_ids=pack_u32(params.allowed_token_ids or ()),
        bad_words=[pack_u32(word) for word in params.bad_words],
        processors=[
            common_pb2.LogitsProcessor(name=name, argument=argument)
            for name, argument in params.processors
        ],
        n=params.n,
        grammar=params.grammar,
    )
    if params.logprobs != NO_LOGPROBS:
        message.logprobs = params.logprobs
    if params.prompt_logprobs != NO_LOGPROBS:
        message.prompt_logprobs = params.prompt_logprobs
    if params.beam is not None:
        message.beam.width = params.beam.width
        message.beam.length_penalty = params.beam.length_penalty
        message.beam.early_stopping = _EARLY_STOPPING_NUMBERS[params.beam.early_stopping]
    if params.external is not None:
        message.external.lease, message.external.tag = params.external.lease, params.external.tag
    return message


def request_from_submit(submit: stage_pb2.Submit, request_id: RequestId) -> Request:
    """The request that a Submit asks for. Raises InvalidRequest.

    Floats arrive as float32: 0.7 comes out as the nearest float32 to it.
    """
    request = Request(
        request_id=request_id,
        prompt_token_ids=unpack_u32(submit.prompt_token_ids, "prompt_token_ids"),
        params=_params_from(submit.params),
        priority=submit.priority,
        output_token_ids=unpack_u32(submit.output_token_ids, "output_token_ids"),
        choice=submit.choice,
        cache_salt=submit.cache_salt,
        tenant=submit.tenant,
        accepted=submit.accepted,
    )
    params = request.params
    if submit.choice + params.n > MAX_CHOICES:
        raise InvalidRequest(
            "choice", f"{params.n} from {submit.choice} on are more than {MAX_CHOICES}"
        )
    if params.beam is not None and request.output_token_ids:
        raise InvalidRequest("output_token_ids", "a beam search begins anew: nothing of it is out")
    return request


def _params_from(params: stage_pb2.SequenceParams) -> SamplingParams:
    return SamplingParams(
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        typical_p=params.typical_p,
        top_n_sigma=params.top_n_sigma,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        no_repeat_ngram_size=params.no_repeat_ngram_size,
        seed=params.seed,
        stop_token_ids=tuple(params.stop_token_ids),
        logit_bias=_logit_bias(params),
        allowed_token_ids=unpack_u32(params.allowed_token_ids, "allowed_token_ids") or None,
        bad_words=tuple(unpack_u32(word, "bad_words") for word in params.bad_words),
        processors=tuple((each.name, each.argument) for each in params.processors),
        logprobs=params.logprobs if params.HasField("logprobs") else NO_LOGPROBS,
        prompt_logprobs=(
            params.prompt_logprobs if params.HasField("prompt_logprobs") else NO_LOGPROBS
        ),
        n=params.n,
        grammar=params.grammar,
        beam=_beam(params.beam) if params.HasField("beam") else None,
        external=external_sampler(params.external) if params.HasField("external") else None,
    )


def _logit_bias(params: stage_pb2.SequenceParams) -> tuple[tuple[int, float], ...]:
    ids = unpack_u32(params.logit_bias_ids, "logit_bias_ids")
    column = params.logit_bias_values
    if len(column) != 4 * len(ids):
        raise InvalidRequest("logit_bias_values", f"{len(column)} bytes for {len(ids)} ids")
    return tuple(zip(ids, struct.unpack(f"<{len(ids)}f", column), strict=True))


def _beam(beam: stage_pb2.BeamParams) -> BeamParams:
    early_stopping = EARLY_STOPPING.get(beam.early_stopping)
    if early_stopping is None:
        raise InvalidRequest("early_stopping", f"{beam.early_stopping} is none of its values")
    return BeamParams(
        width=beam.width, length_penalty=beam.length_penalty, early_stopping=early_stopping
    )


def external_sampler(external: common_pb2.ExternalSampler) -> ExternalSampler:
    """Who draws the tokens, of a request that says so. Raises InvalidRequest."""
    return ExternalSampler(lease=external.lease, tag=external.tag)


def _pack_f32(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


# ----------------------------------------------------------------------------------------- Failure


def failure_from_error(slot: int, error: Exception) -> stage_pb2.Failure:
    """The message for an error of one choice; what is not a RequestError counts as unavailable."""
    failure = stage_pb2.Failure(slot=slot, message=str(error))
    match error:
        case TooLong():
            failure.reason = stage_pb2.FAILURE_REASON_TOO_LONG
        case InvalidRequest():
            failure.reason = stage_pb2.FAILURE_REASON_INVALID
        case QueueFull():
            failure.reason = stage_pb2.FAILURE_REASON_QUEUE_FULL
            failure.retry_after_ms = error.retry_after_ms
        case NotFinite():
            failure.reason = stage_pb2.FAILURE_REASON_NOT_FINITE
        case DeadlinePassed():
            failure.reason = stage_pb2.FAILURE_REASON_TIMED_OUT
        case FatalRequest():
            failure.reason = stage_pb2.FAILURE_REASON_FATAL
        case Unavailable():
            failure.reason = stage_pb2.FAILURE_REASON_UNAVAILABLE
            failure.retry_after_ms = error.retry_after_ms
        case _:
            failure.reason = stage_pb2.FAILURE_REASON_UNAVAILABLE
            failure.retry_after_ms = RETRY_AFTER_MS
    return failure


def error_from_failure(failure: stage_pb2.Failure) -> RequestError:  # noqa: PLR0911  # a table
    """The error that a Failure carries; an unknown reason is Unavailable."""
    field, colon, description = failure.message.partition(": ")
    if not colon:
        field, description = "request", failure.message
    match failure.reason:
        case stage_pb2.FAILURE_REASON_TOO_LONG:
            return TooLong(field, description)
        case stage_pb2.FAILURE_REASON_INVALID:
            return InvalidRequest(field, description)
        case stage_pb2.FAILURE_REASON_QUEUE_FULL:
            return QueueFull(failure.message, failure.retry_after_ms)
        case stage_pb2.FAILURE_REASON_NOT_FINITE:
            return NotFinite(failure.message)
        case stage_pb2.FAILURE_REASON_TIMED_OUT:
            return DeadlinePassed(failure.message)
        case stage_pb2.FAILURE_REASON_FATAL:
            return FatalRequest(failure.message)
        case _:
            return Unavailable(failure.message, failure.retry_after_ms)
