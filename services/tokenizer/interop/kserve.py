"""inference.GRPCInferenceService (KServe's Open Inference Protocol) over the text model."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING

import grpc

import triptych
from triptych.engine_core.errors import InvalidRequest, RequestError, UnknownModel
from triptych.kserve import inference_pb2 as kserve_pb2
from triptych.kserve import inference_pb2_grpc as kserve_pb2_grpc
from triptych.services.runtime.status import rpc_errors, to_status
from triptych.services.tokenizer.admission import Admission
from triptych.services.tokenizer.generation import Generation
from triptych.services.tokenizer.interop.engine import Engine
from triptych.services.tokenizer.interop.kserve_tensors import (
    INPUTS,
    MAX_ID_BYTES,
    Inference,
    read_inference,
    renamed,
    written,
)
from triptych.services.tokenizer.interop.whole_answers import WholeAnswers
from triptych.services.tokenizer.servicer import check_deadline
from triptych.services.tokenizer.stats import Counters
from triptych.services.tokenizer.unread_watch import UnreadWatch
from triptych.v1 import inference_pb2

if TYPE_CHECKING:
    from typing import TypeAlias

    Context: TypeAlias = grpc.aio.ServicerContext[object, object]
    Message: TypeAlias = inference_pb2.GenerateResponse


_VERSION = "1"
_OUTPUT_TYPES = {"text_output": "BYTES", "finish_reason": "BYTES", "output_ids": "INT32"}


class KServeServicer(kserve_pb2_grpc.GRPCInferenceServiceServicer):
    """The rpcs, in the order of the contract."""

    def __init__(
        self,
        generation: Generation,
        admission: Admission,
        counters: Counters,
        unread: UnreadWatch,
        engine: Engine,
    ) -> None:
        self._generation = generation
        self._admission = admission
        self._counters = counters
        self._unread = unread
        self._engine = engine

    async def ServerLive(  # noqa: N802
        self, request: kserve_pb2.ServerLiveRequest, context: "Context"
    ) -> kserve_pb2.ServerLiveResponse:
        """This process answers."""
        return kserve_pb2.ServerLiveResponse(live=True)

    async def ServerReady(  # noqa: N802
        self, request: kserve_pb2.ServerReadyRequest, context: "Context"
    ) -> kserve_pb2.ServerReadyResponse:
        """As grpc.health.v1."""
        return kserve_pb2.ServerReadyResponse(ready=not self._engine.reason())

    async def ModelReady(  # noqa: N802
        self, request: kserve_pb2.ModelReadyRequest, context: "Context"
    ) -> kserve_pb2.ModelReadyResponse:
        """A model that is not served is not ready; that is no error."""
        known = request.name in self._generation.names and request.version in ("", _VERSION)
        return kserve_pb2.ModelReadyResponse(ready=known and not self._engine.reason())

    async def ServerMetadata(  # noqa: N802
        self, request: kserve_pb2.ServerMetadataRequest, context: "Context"
    ) -> kserve_pb2.ServerMetadataResponse:
        """Name and version."""
        return kserve_pb2.ServerMetadataResponse(name="triptych", version=triptych.__version__)

    async def ModelMetadata(  # noqa: N802
        self, request: kserve_pb2.ModelMetadataRequest, context: "Context"
    ) -> kserve_pb2.ModelMetadataResponse:
        """The tensors."""
        async with rpc_errors(context):
            self._check_model(request.name, request.version)
            answer = kserve_pb2.ModelMetadataResponse(
                name=request.name, versions=[_VERSION], platform="triptych"
            )
            for name, datatype in INPUTS.items():
                shape = [-1] if name == "input_ids" else [1]
                answer.inputs.add(name=name, datatype=datatype, shape=shape)
            for name, datatype in _OUTPUT_TYPES.items():
                answer.outputs.add(name=name, datatype=datatype, shape=[-1])
            return answer

    async def ModelInfer(  # noqa: N802
        self, request: kserve_pb2.ModelInferRequest, context: "Context"
    ) -> kserve_pb2.ModelInferResponse:
        """The whole answer."""
        async with rpc_errors(context):
            with self._admission.admit(request.ByteSize()):
                inference = read_inference(request)
                if inference.stream:
                    raise InvalidRequest("stream", "it goes with ModelStreamInfer")
                self._check_model(request.model_name, request.model_version)
                whole = await self._whole(inference, context)
                return written(request, request.model_name, inference.outputs, whole)

    async def ModelStreamInfer(  # type: ignore[override]  # noqa: N802  # grpc.aio takes a writing coroutine
        self,
        request_iterator: AsyncIterator[kserve_pb2.ModelInferRequest],
        context: "Context",
    ) -> None:
        """Request after request; one that fails ends with its error, the stream goes on."""
        async with rpc_errors(context):
            with self._unread.watching(context.write) as write:
                async for request in request_iterator:
                    # Left at once where a write is: what it holds is given back now, not when
                    # the garbage collector comes by.
                    async with aclosing(self._answers(request, context)) as answers:
                        async for answer in answers:
                            await write(answer)

    async def _answers(
        self, request: kserve_pb2.ModelInferRequest, context: "Context"
    ) -> "AsyncGenerator[kserve_pb2.ModelStreamInferResponse, None]":
        try:
            with self._admission.admit(request.ByteSize()):
                inference = read_inference(request)
                self._check_model(request.model_name, request.model_version)
                if not inference.stream:
                    whole = await self._whole(inference, context)
                    yield _streamed(request, inference.outputs, whole, last=True)
                    return
                async with aclosing(self._pieces(inference.request, context)) as pieces:
                    async for piece in pieces:
                        last = piece.HasField("usage")
                        yield _streamed(request, inference.outputs, [piece], last=last)
        except RequestError as error:
            failed = kserve_pb2.ModelInferResponse(
                id=request.id[:MAX_ID_BYTES], model_name=request.model_name[:MAX_ID_BYTES]
            )
            yield kserve_pb2.ModelStreamInferResponse(
                error_message=to_status(error).message, infer_response=failed
            )

    async def _whole(self, inference: Inference, context: "Context") -> "list[Message]":
        """The choices, joined, in their order."""
        whole = WholeAnswers(self._engine.max_message_bytes)
        async with aclosing(self._pieces(inference.request, context)) as pieces:
            async for piece in pieces:
                whole.add(piece)
                await asyncio.sleep(0)  # nothing is written between pieces that wait already
        return whole.joined()

    async def _pieces(
        self, request: inference_pb2.GenerateRequest, context: "Context"
    ) -> "AsyncGenerator[Message, None]":
        check_deadline(context.time_remaining())
        try:
            valid = await self._generation.generate(request)
            remaining = context.time_remaining()
            check_deadline(remaining)
            with self._generation.start(valid, remaining=remaining) as running:
                finished = False
                while not finished:
                    piece = await running.stream.next()
                    finished = piece.usage is not None
                    self._counters.responses_total += 1
                    self._counters.tokens_total += piece.new_tokens
                    yield running.response(inference_pb2.GenerateResponse, piece)
        except InvalidRequest as error:
            raise renamed(error) from error

    def _check_model(self, name: str, version: str) -> None:
        if name not in self._generation.names:
            raise UnknownModel(name, self._generation.names)
        if version not in ("", _VERSION):
            raise InvalidRequest("model_version", f"{version!r:.100} is not {_VERSION!r}")


def _streamed(
    request: kserve_pb2.ModelInferRequest,
    outputs: tuple[str, ...],
    pieces: "list[Message]",
    *,
    last: bool,
) -> kserve_pb2.ModelStreamInferResponse:
    answer = written(request, request.model_name, outputs, pieces)
    answer.parameters["triptych_index"].int64_param = pieces[0].index
    answer.parameters["triton_final_response"].bool_param = last
    return kserve_pb2.ModelStreamInferResponse(infer_response=answer)
