"""triptych.v1.InferenceService: the rpcs, their deadlines and their ends."""

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import grpc

from triptych.engine_core.errors import DeadlinePassed, InvalidRequest
from triptych.services.runtime.status import rpc_errors
from triptych.services.tokenizer.admission import Admission
from triptych.services.tokenizer.generation import Generation
from triptych.services.tokenizer.responses import Response
from triptych.services.tokenizer.session import Session
from triptych.services.tokenizer.stats import Counters
from triptych.services.tokenizer.unread_watch import UnreadWatch
from triptych.services.tokenizer.validation import (
    ValidRequest,
    check_model,
    check_size,
    check_token_ids,
)
from triptych.v1 import inference_pb2, inference_pb2_grpc

# gRPC rounds a deadline up on its way, so one that is over arrives with up to a millisecond left;
# no answer is made in that time.
_LEAST_SECONDS = 0.002

if TYPE_CHECKING:
    Context: TypeAlias = grpc.aio.ServicerContext[object, object]

INFERENCE_SERVICE: str = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Streams are written by coroutines: at any await, cancellation unwinds their `with` blocks."""

    def __init__(
        self,
        generation: Generation,
        admission: Admission,
        counters: Counters,
        max_message_bytes: int,
        unread: UnreadWatch,
    ) -> None:
        self._generation = generation
        self._admission = admission
        self._counters = counters
        self._max_message_bytes = max_message_bytes
        self._unread = unread

    async def Generate(  # type: ignore[override]  # noqa: N802  # grpc.aio takes a writing coroutine
        self,
        request: inference_pb2.GenerateRequest,
        context: "Context",
    ) -> None:
        """A completion, streamed."""
        async with rpc_errors(context):
            with self._admission.admit(request.ByteSize()):
                valid = partial(self._generation.generate, request)
                await self._answer(valid, inference_pb2.GenerateResponse, context)

    async def Chat(  # type: ignore[override]  # noqa: N802  # as above
        self,
        request: inference_pb2.ChatRequest,
        context: "Context",
    ) -> None:
        """The assistant's turn, streamed."""
        async with rpc_errors(context):
            with self._admission.admit(request.ByteSize()):
                valid = partial(self._generation.chat, request)
                await self._answer(valid, inference_pb2.ChatResponse, context)

    async def Session(  # type: ignore[override]  # noqa: N802  # as above
        self,
        request_iterator: AsyncIterator[inference_pb2.SessionRequest],
        context: "Context",
    ) -> None:
        """See the session module."""
        async with rpc_errors(context):
            session = Session(
                self._generation, self._admission, self._counters, context.time_remaining
            )
            with self._unread.watching(context.write) as write:
                await session.run(request_iterator, write)

    async def Tokenize(  # noqa: N802
        self,
        request: inference_pb2.TokenizeRequest,
        context: "Context",
    ) -> inference_pb2.TokenizeResponse:
        """Text or chat to ids."""
        async with rpc_errors(context):
            with self._admission.admit(request.ByteSize()):
                token_ids = await self._generation.tokenized(request)
                answer = inference_pb2.TokenizeResponse(
                    token_ids=token_ids.tolist(),
                    max_model_len=self._generation.facts().max_model_len,
                )
                self._check_size(answer, "messages" if request.messages else "text")
                return answer

    async def Detokenize(  # noqa: N802
        self,
        request: inference_pb2.DetokenizeRequest,
        context: "Context",
    ) -> inference_pb2.DetokenizeResponse:
        """Ids to text."""
        async with rpc_errors(context):
            with self._admission.admit(request.ByteSize()):
                check_model(request.model, self._generation.names)
                facts = self._generation.facts()
                check_size(len(request.token_ids), "token_ids", facts.max_model_len)
                token_ids = check_token_ids(request.token_ids, "token_ids", facts.vocabulary_size)
                skip = request.skip_special_tokens or not request.HasField("skip_special_tokens")
                text = await self._generation.prompts.detokenize(token_ids, skip)
                answer = inference_pb2.DetokenizeResponse(text=text)
                self._check_size(answer, "token_ids")
                return answer

    async def ListModels(  # noqa: N802
        self,
        request: inference_pb2.ListModelsRequest,
        context: "Context",
    ) -> inference_pb2.ListModelsResponse:
        """The served model, once per name."""
        async with rpc_errors(context):
            facts, tokenizer = self._generation.facts(), self._generation.tokenizer
            return inference_pb2.ListModelsResponse(
                models=[
                    inference_pb2.Model(
                        name=name,
                        max_model_len=facts.max_model_len,
                        vocabulary_size=facts.vocabulary_size,
                        architecture=facts.architecture,
                        has_chat_template=tokenizer.has_chat_template,
                        eos_token_ids=tokenizer.eos_token_ids,
                    )
                    for name in self._generation.names
                ]
            )

    async def _answer(
        self,
        validate: Callable[[], Awaitable[ValidRequest]],
        kind: type[Response],
        context: "Context",
    ) -> None:
        check_deadline(context.time_remaining())
        request = await validate()
        remaining = context.time_remaining()
        check_deadline(remaining)
        with (
            self._unread.watching(context.write) as write,
            self._generation.start(request, remaining=remaining) as running,
        ):
            finished = False
            while not finished:
                piece = await running.stream.next()
                finished = piece.usage is not None
                self._counters.responses_total += 1
                self._counters.tokens_total += piece.new_tokens
                await write(running.response(kind, piece))

    def _check_size(
        self,
        answer: inference_pb2.TokenizeResponse | inference_pb2.DetokenizeResponse,
        field: str,
    ) -> None:
        """gRPC itself would say neither what is too large nor how to mend it."""
        size, limit = answer.ByteSize(), self._max_message_bytes
        if size > limit:
            raise InvalidRequest(
                field, f"its answer of {size} bytes is above max_message_bytes {limit}"
            )


def check_deadline(remaining: float | None) -> None:
    """Raise DeadlinePassed unless a call has seconds left in which an answer can be made."""
    if remaining is not None and remaining < _LEAST_SECONDS:
        raise DeadlinePassed("the deadline passed before the request was submitted")
