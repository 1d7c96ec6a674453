"""The routes that generate: a body in, a GenerationReply out."""

import time
import uuid
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from triptych.services.tokenizer.generation import Running
from triptych.services.tokenizer.openai_http import chat, completions, responses
from triptych.services.tokenizer.openai_http.answers import Answers
from triptych.services.tokenizer.openai_http.body import parsed
from triptych.services.tokenizer.openai_http.chat import ChatCompletionRequest, ChatReply
from triptych.services.tokenizer.openai_http.completions import CompletionReply, CompletionRequest
from triptych.services.tokenizer.openai_http.door import Door, label_of
from triptych.services.tokenizer.openai_http.logprobs import Json
from triptych.services.tokenizer.openai_http.openapi import takes
from triptych.services.tokenizer.openai_http.reply import GenerationReply, Work
from triptych.services.tokenizer.openai_http.responses import ResponsesRequest
from triptych.services.tokenizer.openai_http.responses_reply import ResponsesReply
from triptych.services.tokenizer.openai_http.route import router
from triptych.services.tokenizer.pieces import Piece
from triptych.services.tokenizer.validation import check_model
from triptych.v1 import inference_pb2


def generate_routes(door: Door) -> APIRouter:
    """POST /v1/completions, /v1/chat/completions and /v1/responses."""
    routes = router("generation")
    generation = door.generation

    def identity(prefix: str, model: str | None) -> Json:
        return {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model or generation.names[0],
        }

    @routes.post("/v1/completions", **takes(CompletionRequest))
    async def complete(request: Request) -> Response:
        """Complete one or several prompts."""
        body = await door.body(request)
        fields = parsed(CompletionRequest, body)
        check_model(fields.model or "", generation.names)
        requests, names = completions.requests_of(fields, label_of(request))
        return GenerationReply(
            Answers(_generated, door),
            Work(
                [partial(generation.generate, each) for each in requests],
                len(body),
                names,
                bool(fields.stream),
            ),
            CompletionReply(fields, identity("cmpl", fields.model)),
            door.limits.keep_alive,
        )

    @routes.post("/v1/chat/completions", **takes(ChatCompletionRequest))
    async def chat_completion(request: Request) -> Response:
        """Give the assistant's turn of a conversation."""
        body = await door.body(request)
        fields = parsed(ChatCompletionRequest, body)
        check_model(fields.model or "", generation.names)
        message, names = chat.request_of(fields, label_of(request))
        return GenerationReply(
            Answers(_chatted, door),
            Work([partial(generation.chat, message)], len(body), names, bool(fields.stream)),
            ChatReply(fields, identity("chatcmpl", fields.model)),
            door.limits.keep_alive,
        )

    @routes.post("/v1/responses", **takes(ResponsesRequest))
    async def response(request: Request) -> Response:
        """The same as chat, in the form of OpenAI's Responses API; nothing is stored."""
        body = await door.body(request)
        fields = parsed(ResponsesRequest, body)
        check_model(fields.model or "", generation.names)
        message, names = responses.request_of(fields, label_of(request))
        return GenerationReply(
            Answers(_chatted, door),
            Work([partial(generation.chat, message)], len(body), names, bool(fields.stream)),
            ResponsesReply(fields, identity("resp", fields.model)),
            door.limits.keep_alive,
        )

    return routes


def _generated(running: Running, piece: Piece) -> inference_pb2.GenerateResponse:
    return running.response(inference_pb2.GenerateResponse, piece)


def _chatted(running: Running, piece: Piece) -> inference_pb2.ChatResponse:
    return running.response(inference_pb2.ChatResponse, piece)
