"""A gRPC client of the public service, as `generate`, `chat` and `demo` use it."""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self, TextIO

import grpc

from triptych.v1 import common_pb2, inference_pb2, inference_pb2_grpc

DEFAULT_ADDRESS = "127.0.0.1:50051"

Response = inference_pb2.GenerateResponse | inference_pb2.ChatResponse


class Call(Protocol):
    """A running stream: what `Generate` and `Chat` of the stub return."""

    def __iter__(self) -> Iterator[Response]: ...

    def cancel(self) -> bool:
        """End it; the server frees what it held."""
        ...


class Client:
    """One channel to a tokenizer service; use it as a context."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._channel.close()

    def generate(self, request: inference_pb2.GenerateRequest, timeout: float | None) -> Call:
        """Start a Generate stream. Reading it raises grpc.RpcError."""
        return self._stub.Generate(request, timeout=timeout)

    def chat(self, request: inference_pb2.ChatRequest, timeout: float | None) -> Call:
        """Start a Chat stream. Reading it raises grpc.RpcError."""
        return self._stub.Chat(request, timeout=timeout)


@dataclass(slots=True)
class Answer:
    """What a stream brought, and when. Times are in seconds since the call."""

    text: str = ""
    reasoning: str = ""
    first: float = 0.0
    total: float = 0.0
    usage: common_pb2.Usage = field(default_factory=common_pb2.Usage)
    finish_reason: common_pb2.FinishReason.ValueType = common_pb2.FINISH_REASON_UNSPECIFIED

    def summary(self) -> str:
        """Usage, speed and why it ended, in one line."""
        usage = self.usage
        reason = common_pb2.FinishReason.Name(self.finish_reason)
        words = [
            f"{usage.prompt_tokens} prompt + {usage.completion_tokens} output tokens",
            f"first after {self.first:.2f} s",
            f"{self.total:.2f} s in all",
        ]
        if usage.completion_tokens and self.total:
            # Not from the first message on: it may bring many tokens, or all of them.
            words[-1] += f" ({usage.completion_tokens / self.total:.1f} tokens/s)"
        words.append(f"ended by {reason.removeprefix('FINISH_REASON_').lower()}")
        return ", ".join(words)


def _ignored(_piece: str) -> None:
    pass


def read_stream(
    call: Call,
    on_text: Callable[[str], None] = _ignored,
    on_reasoning: Callable[[str], None] = _ignored,
) -> Answer:
    """Read a stream to its end, each piece going to `on_text` or `on_reasoning`.

    Raises grpc.RpcError.

    On KeyboardInterrupt the call is cancelled and the interrupt goes on.
    """
    answer = Answer()
    begin = time.monotonic()
    try:
        for response in call:
            if not answer.first:
                answer.first = time.monotonic() - begin
            if isinstance(response, inference_pb2.ChatResponse) and response.reasoning:
                answer.reasoning += response.reasoning
                on_reasoning(response.reasoning)
            answer.text += response.text
            on_text(response.text)
            if response.finish_reason != common_pb2.FINISH_REASON_UNSPECIFIED:
                answer.finish_reason = response.finish_reason
                answer.usage.CopyFrom(response.usage)
    except KeyboardInterrupt:
        call.cancel()
        raise
    answer.total = time.monotonic() - begin
    return answer


def print_stream(call: Call, out: TextIO) -> Answer:
    """Write the pieces as they come, and a newline; raises what `read_stream` raises.

    What the model thinks is shown on a terminal, dimmed; elsewhere the answer stands alone.
    """
    written = _Written(out)
    try:
        return read_stream(call, written.text, written.reasoning)
    finally:
        written.end()


class _Written:
    """What has been written to a stream of text."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._terminal = out.isatty()
        self._last = ""
        self._dim = False

    def text(self, piece: str) -> None:
        """A piece of the answer."""
        if piece:
            self._bright()
            self._write(piece)

    def reasoning(self, piece: str) -> None:
        """A piece of what was thought before it."""
        if self._terminal:
            if not self._dim:
                self._dim = True
                self._out.write(_DIM)
            self._write(piece)

    def end(self) -> None:
        """Close the last line."""
        self._bright()
        if self._last and not self._last.endswith("\n"):
            self._write("\n")

    def _bright(self) -> None:
        if self._dim:
            self._dim = False
            self._out.write(_BRIGHT)
            if not self._last.endswith("\n"):
                self._write("\n")

    def _write(self, piece: str) -> None:
        self._last = piece
        self._out.write(printable(piece) if self._terminal else piece)
        self._out.flush()


_DIM, _BRIGHT = "\x1b[2m", "\x1b[22m"


def printable(text: str) -> str:
    """Without the control characters by which a model's output could steer a terminal."""
    return text.translate(_CONTROLS)


_CONTROLS = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)], "\N{REPLACEMENT CHARACTER}")
for _kept in "\n\t":
    del _CONTROLS[ord(_kept)]


def describe(error: grpc.RpcError) -> str:
    """An RPC's failure as one line: its status code and what the server said."""
    code, details = error.code(), error.details() or "no details"
    if code == grpc.StatusCode.UNAVAILABLE and "failed to connect" in details:
        return "UNAVAILABLE: nothing answers there; start an engine with triptych serve"
    return f"{code.name}: {details}"


def print_summary(answer: Answer) -> None:
    """Usage and speed on stderr, where they do not mix with the output."""
    sys.stderr.write(f"[{answer.summary()}]\n")
    sys.stderr.flush()
