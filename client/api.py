"""The Python client of a Triptych engine: synchronous and asyncio, over gRPC.

    from triptych.client.api import Client, SamplingParams

    with Client("127.0.0.1:50051") as client:
        for piece in client.generate("Once upon a time", SamplingParams(max_tokens=32)):
            print(piece.text, end="", flush=True)
        print(client.chat("Name three colours.").answer().text)

Requests and responses are the messages of `triptych.v1`; docs/client.md has the rest. Needs grpcio
and the generated messages only: neither torch nor the engine.
"""

from triptych.client.answer import Answer, Choice
from triptych.client.asynchronous import AsyncClient
from triptych.client.asynchronous_session import AsyncSession
from triptych.client.asynchronous_stream import AsyncStream
from triptych.client.blocking import Client
from triptych.client.blocking_session import Session
from triptych.client.blocking_stream import Stream
from triptych.client.errors import (
    Cancelled,
    DeadlineExceeded,
    DuplicateId,
    InternalError,
    InvalidRequest,
    NotSupported,
    QueueFull,
    ResumeMismatch,
    SamplerError,
    SlowReader,
    TriptychError,
    Unauthenticated,
    Unavailable,
    UnknownModel,
)
from triptych.client.options import DEFAULT_ADDRESS, ClientOptions, RetryPolicy
from triptych.client.sampler import ExternalSampler, LogitsRow
from triptych.v1.common_pb2 import BeamSearch, FinishReason, SamplingParams, StructuredOutput
from triptych.v1.inference_pb2 import (
    ChatMessage,
    ChatRequest,
    ChatResponse,
    GenerateRequest,
    GenerateResponse,
    Model,
    Tool,
    ToolChoice,
)

__all__ = [
    "DEFAULT_ADDRESS",
    "Answer",
    "AsyncClient",
    "AsyncSession",
    "AsyncStream",
    "BeamSearch",
    "Cancelled",
    "ChatMessage",
    "ChatRequest",
    "ChatResponse",
    "Choice",
    "Client",
    "ClientOptions",
    "DeadlineExceeded",
    "DuplicateId",
    "ExternalSampler",
    "FinishReason",
    "GenerateRequest",
    "GenerateResponse",
    "InternalError",
    "InvalidRequest",
    "LogitsRow",
    "Model",
    "NotSupported",
    "QueueFull",
    "ResumeMismatch",
    "RetryPolicy",
    "SamplerError",
    "SamplingParams",
    "Session",
    "SlowReader",
    "Stream",
    "StructuredOutput",
    "Tool",
    "ToolChoice",
    "TriptychError",
    "Unauthenticated",
    "Unavailable",
    "UnknownModel",
]
