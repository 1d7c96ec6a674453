"""Server-sent events, as bytes.

By hand, where a library would do: an event of a stream is one concatenation here and a fixed
part that is made once a request; sse-starlette makes an object and joins strings for each, several
times the cost of all else that a token costs.
"""

from pydantic_core import to_json

from triptych.services.tokenizer.openai_http.errors import HttpError

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]


def event(data: object) -> bytes:
    """One event. JSON has no line breaks of its own, so it is one line."""
    return b"data: " + to_json(data) + b"\n\n"


def named_event(name: str, data: object) -> bytes:
    """One event with a type, as the Responses API has them."""
    return b"event: " + name.encode() + b"\ndata: " + to_json(data) + b"\n\n"


def error_event(error: HttpError) -> bytes:
    """What ends a stream that broke; nothing follows, [DONE] neither."""
    return b"data: " + error.body() + b"\n\n"
