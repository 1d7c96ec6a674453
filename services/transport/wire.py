"""Stage messages to engine_core values and back: total, and tested both ways.

Total: every message of a peer gives a value or raises InvalidRequest, nothing else. The bounds of
the values themselves are checked by the values (SamplingParams, Request).
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from triptych.engine_core.errors import (
    RETRY_AFTER_MS,
    InvalidRequest,
    NotFinite,
    QueueFull,
    RequestError,
    TooLong,
    Unavailable,
)
from triptych.engine_core.ids import RequestId
from triptych.engine_core.request import Request
from triptych.engine_core.sampling_params import SamplingParams
from triptych.engine_core.step import Failed, FinishReason, Token
from triptych.v1 import stage_pb2

MAX_LABEL_BYTES = 128
_FINISH_BYTES = frozenset((0, *FinishReason))


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
        request_id=label,
        prompt_token_ids=prompt,
        params=stage_pb2.SequenceParams(
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=params.seed,
            stop_token_ids=params.stop_token_ids,
        ),
    )


def request_from_submit(submit: stage_pb2.Submit, request_id: RequestId) -> Request:
    """The request that a Submit asks for. Raises InvalidRequest.

    Floats arrive as float32: 0.7 comes out as the nearest float32 to it.
    """
    params = submit.params
    return Request(
        request_id=request_id,
        prompt_token_ids=unpack_u32(submit.prompt_token_ids, "prompt_token_ids"),
        params=SamplingParams(
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=params.seed,
            stop_token_ids=tuple(params.stop_token_ids),
        ),
        priority=submit.priority,
        output_token_ids=unpack_u32(submit.output_token_ids, "output_token_ids"),
    )


# ------------------------------------------------------------------------------------- StepOutputs


SlotToken = tuple[int, int, int]
"""(slot, token id, finish): one output token of the request that the connection calls `slot`.

`finish` is a FinishReason, or 0 while the sequence goes on. A plain tuple, since there is one for
every token: making a class of it costs four times as much.
"""


@dataclass(frozen=True, slots=True)
class SlotFailure:
    """The request that the connection calls `slot` ended with an error."""

    slot: int
    error: RequestError


def outputs_from_events(
    step_id: int, events: Sequence[tuple[int, Token | Failed]]
) -> stage_pb2.StepOutputs:
    """One message for what a step meant to one tokenizer process, from (slot, event) pairs."""
    tokens = [(slot, event) for slot, event in events if isinstance(event, Token)]
    return stage_pb2.StepOutputs(
        step_id=step_id,
        slots=pack_u32([slot for slot, _ in tokens]),
        token_ids=pack_u32([token.token_id for _, token in tokens]),
        finish_reasons=bytes(int(token.finish or 0) for _, token in tokens),
        failures=[
            failure_from_error(slot, event.error)
            for slot, event in events
            if isinstance(event, Failed)
        ],
    )


def tokens_from_outputs(outputs: stage_pb2.StepOutputs) -> list[SlotToken]:
    """The tokens of a StepOutputs, in order. Raises InvalidRequest when columns do not match."""
    slots = unpack_u32(outputs.slots, "slots")
    token_ids = unpack_u32(outputs.token_ids, "token_ids")
    reasons = outputs.finish_reasons
    if not len(slots) == len(token_ids) == len(reasons):
        raise InvalidRequest(
            "outputs", f"columns of {len(slots)}, {len(token_ids)} and {len(reasons)} rows"
        )
    unknown = set(reasons) - _FINISH_BYTES
    if unknown:
        raise InvalidRequest("finish_reasons", f"{min(unknown)} is no finish reason")
    return list(zip(slots, token_ids, reasons, strict=True))


def failures_from_outputs(outputs: stage_pb2.StepOutputs) -> list[SlotFailure]:
    """The failures of a StepOutputs, in order."""
    return [SlotFailure(failure.slot, error_from_failure(failure)) for failure in outputs.failures]


# ----------------------------------------------------------------------------------------- Failure


def failure_from_error(slot: int, error: Exception) -> stage_pb2.Failure:
    """The message for an error of one request; what is not a RequestError counts as unavailable."""
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
        case Unavailable():
            failure.reason = stage_pb2.FAILURE_REASON_UNAVAILABLE
            failure.retry_after_ms = error.retry_after_ms
        case _:
            failure.reason = stage_pb2.FAILURE_REASON_UNAVAILABLE
            failure.retry_after_ms = RETRY_AFTER_MS
    return failure


def error_from_failure(failure: stage_pb2.Failure) -> RequestError:
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
        case _:
            return Unavailable(failure.message, failure.retry_after_ms)
