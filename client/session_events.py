"""What a session's messages say, for its blocking and its asyncio form."""

import math
from collections.abc import Callable

import grpc

from triptych.client.attempts import RequestT
from triptych.client.errors import SlowReader, from_status
from triptych.client.received import ResponseT
from triptych.v1 import inference_pb2

MAX_UNREAD = 65_536
"""Events of one request that wait to be read. The engine bounds what it holds; this bounds us."""


Reading = Callable[[inference_pb2.SessionEvent], ResponseT]
"""The response in an event of a request of this kind."""


def output_of(event: inference_pb2.SessionEvent) -> inference_pb2.GenerateResponse:
    """Of a GenerateRequest. Raises TriptychError where the event is the request's failure."""
    _check(event)
    return event.output


def chat_of(event: inference_pb2.SessionEvent) -> inference_pb2.ChatResponse:
    """Of a ChatRequest. Raises TriptychError where the event is the request's failure."""
    _check(event)
    return event.chat


def start_of(
    call_id: int, request: RequestT, seconds: float | None
) -> inference_pb2.SessionRequest:
    """The message that starts a request, its deadline as a time-out: a session's has none."""
    start = inference_pb2.SessionStart(id=call_id)
    if isinstance(request, inference_pb2.GenerateRequest):
        start.generate.CopyFrom(request)
        sent: inference_pb2.GenerateRequest | inference_pb2.ChatRequest = start.generate
    else:
        start.chat.CopyFrom(request)
        sent = start.chat
    if seconds is not None:
        milliseconds = min(max(1, math.ceil(seconds * 1000)), 2**32 - 1)
        if not sent.HasField("timeout_ms") or milliseconds < sent.timeout_ms:
            sent.timeout_ms = milliseconds
    return inference_pb2.SessionRequest(start=start)


def cancel_of(call_id: int) -> inference_pb2.SessionRequest:
    """The message that cancels a request."""
    return inference_pb2.SessionRequest(cancel=inference_pb2.SessionCancel(id=call_id))


def is_last(event: inference_pb2.SessionEvent) -> bool:
    """Whether nothing more comes for this request."""
    match event.WhichOneof("event"):
        case "output":
            return event.output.HasField("usage")
        case "chat":
            return event.chat.HasField("usage")
        case _:
            return True


def too_slow() -> SlowReader:
    """The error of a request whose events nobody reads."""
    return SlowReader(
        f"{MAX_UNREAD} responses of this request wait to be read",
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    )


def _check(event: inference_pb2.SessionEvent) -> None:
    if event.HasField("error"):
        raise from_status(event.error.code, event.error.message, event.error.status)
