"""The synchronous client."""

import threading
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Protocol, Self, TypeVar

import grpc

from triptych.client.attempts import Attempts, Failures, deadline_of, remaining
from triptych.client.blocking_session import Session
from triptych.client.blocking_stream import RpcCall, Stream
from triptych.client.errors import from_rpc_error
from triptych.client.options import DEFAULT_ADDRESS, ClientOptions
from triptych.client.pauses import ProbeCall, pause
from triptych.client.requests import (
    Messages,
    Prompt,
    chat_request,
    generate_request,
    tokenize_request,
)
from triptych.v1 import common_pb2, inference_pb2, inference_pb2_grpc

_In_contra = TypeVar("_In_contra", contravariant=True)
_Out_co = TypeVar("_Out_co", covariant=True)


class _Unary(Protocol[_In_contra, _Out_co]):
    def __call__(
        self,
        request: _In_contra,
        *,
        timeout: float | None = None,
        metadata: tuple[tuple[str, str], ...] | None = None,
    ) -> _Out_co: ...


class Client:
    """One channel to an engine. Use it as a context, from any thread.

    `address` is whatever gRPC takes: "host:port", "dns:///name:port", "unix:/path", ...
    """

    def __init__(
        self, address: str = DEFAULT_ADDRESS, options: ClientOptions | None = None
    ) -> None:
        self.options = options or ClientOptions()
        self._metadata = self.options.metadata
        arguments = self.options.arguments()
        if self.options.credentials is None:
            self._channel = grpc.insecure_channel(address, arguments)
        else:
            self._channel = grpc.secure_channel(address, self.options.credentials, arguments)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._probe = partial(_probe, self._stub, self._metadata)
        self._pause = partial(pause, self._probe)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel; what still runs ends with Cancelled."""
        self._channel.close()

    def generate(
        self,
        prompt: Prompt,
        params: common_pb2.SamplingParams | None = None,
        *,
        model: str = "",
        timeout: float | None = None,
    ) -> Stream[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]:
        """Complete a prompt: text, token ids, or a whole GenerateRequest.

        `timeout`: seconds for everything, retries included; None: that of the options.
        """
        request = generate_request(prompt, params, model)
        attempts: Attempts[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]
        attempts = Attempts(request, self.options, timeout)
        return Stream(self._open_generate, attempts, self._pause)

    def chat(
        self,
        messages: Messages,
        params: common_pb2.SamplingParams | None = None,
        *,
        model: str = "",
        timeout: float | None = None,
    ) -> Stream[inference_pb2.ChatRequest, inference_pb2.ChatResponse]:
        """The assistant's turn after what the user says, after messages, or of a whole ChatRequest.

        `timeout`: as for `generate`.
        """
        request = chat_request(messages, params, model)
        attempts: Attempts[inference_pb2.ChatRequest, inference_pb2.ChatResponse]
        attempts = Attempts(request, self.options, timeout)
        return Stream(self._open_chat, attempts, self._pause)

    def session(self) -> Session:
        """One stream for many requests."""
        return Session(self._stub, self.options, self._pause)

    def tokenize(
        self,
        text: str | Sequence[inference_pb2.ChatMessage] | inference_pb2.TokenizeRequest,
        *,
        model: str = "",
        timeout: float | None = None,
    ) -> list[int]:
        """The token ids of a text or of a rendered chat. Raises TriptychError."""
        request = tokenize_request(text, model)
        return list(self._unary(self._stub.Tokenize, request, timeout).token_ids)

    def detokenize(
        self, token_ids: Sequence[int], *, model: str = "", timeout: float | None = None
    ) -> str:
        """The text of token ids, without special tokens. Raises TriptychError."""
        request = inference_pb2.DetokenizeRequest(model=model, token_ids=token_ids)
        return self._unary(self._stub.Detokenize, request, timeout).text

    def models(self, *, timeout: float | None = None) -> list[inference_pb2.Model]:
        """What is served. Raises TriptychError."""
        request = inference_pb2.ListModelsRequest()
        return list(self._unary(self._stub.ListModels, request, timeout).models)

    def _open_generate(
        self, request: inference_pb2.GenerateRequest, seconds: float | None
    ) -> RpcCall[inference_pb2.GenerateResponse]:
        return RpcCall(self._stub.Generate(request, timeout=seconds, metadata=self._metadata))

    def _open_chat(
        self, request: inference_pb2.ChatRequest, seconds: float | None
    ) -> RpcCall[inference_pb2.ChatResponse]:
        return RpcCall(self._stub.Chat(request, timeout=seconds, metadata=self._metadata))

    def _unary(
        self,
        call: _Unary[_In_contra, _Out_co],
        request: _In_contra,
        timeout: float | None,
    ) -> _Out_co:
        deadline = deadline_of(self.options.timeout if timeout is None else timeout)
        failures = Failures(self.options.retry, deadline)
        while True:
            try:
                return call(request, timeout=remaining(deadline), metadata=self._metadata)
            except grpc.RpcError as error:
                failure = from_rpc_error(error)
                wait = failures.wait_after(failure)
            self._pause(wait, failure.retry_after, threading.Event())


def _probe(
    stub: inference_pb2_grpc.InferenceServiceStub,
    metadata: tuple[tuple[str, str], ...],
    seconds: float,
    wait_for_ready: bool,
) -> ProbeCall:
    return stub.ListModels.future(
        inference_pb2.ListModelsRequest(),
        timeout=seconds,
        metadata=metadata,
        wait_for_ready=wait_for_ready,
    )
