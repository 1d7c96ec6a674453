"""Reads StepOutputs messages: what a step meant to the choices of one tokenizer process.

Total: a message gives values or raises InvalidRequest. Without numpy, so that the tokenizer process
starts sooner. output_columns writes them.
"""

import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from triptych.engine_core.errors import InvalidRequest, RequestError
from triptych.engine_core.ids import RequestId
from triptych.engine_core.step import FinishReason
from triptych.services.transport.wire import error_from_failure, unpack_u32
from triptych.v1 import stage_pb2

Number = TypeVar("Number", int, float)

SLOT_BITS = 32
_LITTLE = sys.byteorder == "little"
_FINISH_BYTES = frozenset((0, *FinishReason))


SlotToken = tuple[int, int, int]
"""(slot, token id, finish): one output token of the choice that the connection calls `slot`.

`finish` is a FinishReason, or 0 while the sequence goes on. A plain tuple, since there is one for
every token: making a class of it costs four times as much.
"""


class TokenLogprobs(NamedTuple):
    """Logprobs at one position: of the token, its rank from 1 on, and the most likely tokens'.

    `top_ids` u32 [k], `top_logprobs` float32 [k], most likely first.
    """

    logprob: float
    rank: int
    top_ids: "array[int]"
    top_logprobs: "array[float]"


class PromptRows(NamedTuple):
    """Logprobs of the prompt tokens [position, position + len(rows)) of the choice at `slot`."""

    slot: int
    position: int
    rows: list[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class SlotFailure:
    """The choice that the connection calls `slot` ended with an error."""

    slot: int
    error: RequestError


def request_id_of(peer: int, slot: int) -> RequestId:
    """The core's name for a slot of a connection. `slot` is below 2^32."""
    return RequestId(peer << SLOT_BITS | slot)


def slot_of(request_id: int) -> int:
    """The slot within the connection `peer_of(request_id)`."""
    return request_id & ((1 << SLOT_BITS) - 1)


def peer_of(request_id: int) -> int:
    """The connection that a request came from."""
    return request_id >> SLOT_BITS


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


def logprobs_from_outputs(outputs: stage_pb2.StepOutputs) -> Mapping[int, TokenLogprobs]:
    """By entry. Raises InvalidRequest for torn columns, or an entry that does not exist."""
    return {
        _entry(row.entry, outputs): TokenLogprobs(
            row.logprob, row.rank, *_top(row.top_ids, row.top_logprobs)
        )
        for row in outputs.logprobs
    }


def scores_from_outputs(outputs: stage_pb2.StepOutputs) -> Mapping[int, float]:
    """By entry. Raises InvalidRequest for an entry that does not exist."""
    return {_entry(row.entry, outputs): row.score for row in outputs.scores}


def prompt_logprobs_from_outputs(outputs: stage_pb2.StepOutputs) -> list[PromptRows]:
    """The prompt logprobs of a StepOutputs, in order. Raises InvalidRequest for torn columns."""
    return [
        PromptRows(message.slot, message.position, _rows(message))
        for message in outputs.prompt_logprobs
    ]


def failures_from_outputs(outputs: stage_pb2.StepOutputs) -> list[SlotFailure]:
    """The failures of a StepOutputs, in order."""
    return [SlotFailure(failure.slot, error_from_failure(failure)) for failure in outputs.failures]


def _entry(entry: int, outputs: stage_pb2.StepOutputs) -> int:
    count = len(outputs.finish_reasons)
    if entry >= count:
        raise InvalidRequest("entry", f"{entry} is not below the {count} entries")
    return entry


def _top(top_ids: bytes, top_logprobs: bytes) -> tuple["array[int]", "array[float]"]:
    if len(top_ids) % 4 or len(top_ids) != len(top_logprobs):
        raise InvalidRequest("top_ids", f"{len(top_ids)} bytes beside {len(top_logprobs)}")
    ids: array[int] = array("I", top_ids)
    return ids if _LITTLE else _swapped(ids), _floats(top_logprobs)


def _floats(column: bytes) -> "array[float]":
    values: array[float] = array("f", column)
    return values if _LITTLE else _swapped(values)


def _swapped(values: "array[Number]") -> "array[Number]":
    values.byteswap()
    return values


def _rows(message: stage_pb2.PromptLogprobs) -> list[TokenLogprobs]:
    ranks = unpack_u32(message.ranks, "ranks")
    counts = unpack_u32(message.top_counts, "top_counts")
    if not len(message.logprobs) == len(message.ranks) == len(message.top_counts):
        raise InvalidRequest("prompt_logprobs", "its columns differ in length")
    logprobs: Sequence[float] = _floats(message.logprobs)
    top_ids, top_logprobs = _top(message.top_ids, message.top_logprobs)
    if sum(counts) != len(top_ids):
        raise InvalidRequest("top_counts", f"they make {sum(counts)}, not {len(top_ids)}")
    rows, begin = [], 0
    for logprob, rank, count in zip(logprobs, ranks, counts, strict=True):
        end = begin + count
        rows.append(TokenLogprobs(logprob, rank, top_ids[begin:end], top_logprobs[begin:end]))
        begin = end
    return rows
