"""A scripted InferenceService in this process, for tests of clients: a call takes the next act."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from queue import SimpleQueue
from typing import NoReturn

import grpc
from google.rpc import status_pb2

from triptych.engine_core.errors import RequestError
from triptych.services.runtime.status import to_status
from triptych.v1 import common_pb2, inference_pb2, inference_pb2_grpc

Request = inference_pb2.GenerateRequest | inference_pb2.ChatRequest
Response = inference_pb2.GenerateResponse | inference_pb2.ChatResponse


@dataclass(slots=True)
class Act:
    """What one call brings: responses, then an end."""

    responses: Sequence[Response] = ()
    error: RequestError | None = None
    """None: it ends OK."""
    bare: grpc.StatusCode | None = None
    """A status without details, as gRPC itself or a proxy gives."""
    hold: threading.Event | None = None
    """Waited for before the end (so that the client can cancel)."""


@dataclass
class FakeEngine:
    """Acts to come, requests that came, and how calls ended."""

    address: str = ""
    acts: "SimpleQueue[Act]" = field(default_factory=SimpleQueue)
    requests: list[Request] = field(default_factory=list)
    metadata: list[dict[str, str | bytes]] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)
    session_cancels: "SimpleQueue[int]" = field(default_factory=SimpleQueue)
    sessions: int = 0

    def expect(self, *acts: Act) -> None:
        for act in acts:
            self.acts.put(act)


class _Servicer(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        for response in self._act(request, context):
            assert isinstance(response, inference_pb2.GenerateResponse)
            yield response

    def Chat(  # noqa: N802
        self, request: inference_pb2.ChatRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.ChatResponse]:
        for response in self._act(request, context):
            assert isinstance(response, inference_pb2.ChatResponse)
            yield response

    def Tokenize(  # noqa: N802
        self, request: inference_pb2.TokenizeRequest, context: grpc.ServicerContext
    ) -> inference_pb2.TokenizeResponse:
        self._end(self._engine.acts.get(timeout=30), context)
        return inference_pb2.TokenizeResponse(token_ids=request.text.encode())

    def Detokenize(  # noqa: N802
        self, request: inference_pb2.DetokenizeRequest, context: grpc.ServicerContext
    ) -> inference_pb2.DetokenizeResponse:
        return inference_pb2.DetokenizeResponse(text=bytes(request.token_ids).decode())

    def ListModels(  # noqa: N802
        self, request: inference_pb2.ListModelsRequest, context: grpc.ServicerContext
    ) -> inference_pb2.ListModelsResponse:
        return inference_pb2.ListModelsResponse(models=[inference_pb2.Model(name="fake")])

    def Session(  # noqa: N802
        self,
        request_iterator: Iterator[inference_pb2.SessionRequest],
        context: grpc.ServicerContext,
    ) -> Iterator[inference_pb2.SessionResponse]:
        """Each start takes an act; an act that ends `bare` breaks the whole session."""
        self._engine.sessions += 1
        for request in request_iterator:
            if request.WhichOneof("action") == "cancel":
                self._engine.session_cancels.put(request.cancel.id)
                continue
            start = request.start
            act = self._engine.acts.get(timeout=30)
            self._engine.requests.append(start.chat if start.HasField("chat") else start.generate)
            for response in act.responses:
                yield inference_pb2.SessionResponse(events=[_event(start.id, response)])
            if act.hold is not None:
                act.hold.wait(30)
            if act.error is not None:
                yield inference_pb2.SessionResponse(
                    events=[_failure(start.id, to_status(act.error))]
                )
            elif act.bare is not None:
                context.abort(act.bare, "the session breaks")

    def _act(self, request: Request, context: grpc.ServicerContext) -> Iterator[Response]:
        act = self._engine.acts.get(timeout=30)
        if not context.add_callback(self._engine.cancelled.set):
            self._engine.cancelled.set()  # it has ended already
        self._engine.metadata.append(dict(context.invocation_metadata()))
        self._engine.requests.append(request)
        yield from act.responses
        if act.hold is not None:
            act.hold.wait(30)
        self._end(act, context)

    def _end(self, act: Act, context: grpc.ServicerContext) -> None:
        if act.error is not None:
            _abort(context, to_status(act.error))
        if act.bare is not None:
            context.abort(act.bare, "no details")


def _abort(context: grpc.ServicerContext, status: status_pb2.Status) -> NoReturn:
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    codes: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
    context.abort(codes[status.code], status.message)


def _event(call_id: int, response: Response) -> inference_pb2.SessionEvent:
    if isinstance(response, inference_pb2.ChatResponse):
        return inference_pb2.SessionEvent(id=call_id, chat=response)
    return inference_pb2.SessionEvent(id=call_id, output=response)


def _failure(call_id: int, status: status_pb2.Status) -> inference_pb2.SessionEvent:
    error = inference_pb2.SessionError(
        code=status.code, message=status.message, status=status.SerializeToString()
    )
    return inference_pb2.SessionEvent(id=call_id, error=error)


@contextmanager
def fake_engine(
    credentials: grpc.ServerCredentials | None = None, port: int = 0
) -> Iterator[FakeEngine]:
    """Serve it, on a free port by default."""
    engine = FakeEngine()
    # Windows stay small: what is not read holds up whoever writes.
    server = grpc.server(ThreadPoolExecutor(16), options=[("grpc.http2.bdp_probe", 0)])
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(_Servicer(engine), server)
    if credentials is None:
        port = server.add_insecure_port(f"127.0.0.1:{port}")
    else:
        port = server.add_secure_port(f"127.0.0.1:{port}", credentials)
    engine.address = f"127.0.0.1:{port}"
    server.start()
    try:
        yield engine
    finally:
        server.stop(0).wait(10)


def told(
    text: str, *cuts: int, end: bool = True, index: int = 0
) -> list[inference_pb2.GenerateResponse]:
    """An answer of one token a character (its code), cut into responses behind these tokens."""
    borders = [0, *cuts, len(text)]
    responses = [
        inference_pb2.GenerateResponse(
            text=text[a:b], token_ids=[*map(ord, text[a:b])], index=index
        )
        for a, b in pairwise(borders)
    ]
    if end:
        responses[-1].finish_reason = common_pb2.FINISH_REASON_LENGTH
        responses[-1].usage.completion_tokens = len(text)
    return responses
