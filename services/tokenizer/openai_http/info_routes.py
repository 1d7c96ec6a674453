"""The routes that generate nothing: models, tokens, health, metrics, version."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Field, JsonValue
from pydantic_core import to_json
from starlette.responses import JSONResponse, PlainTextResponse, Response

from triptych.engine_core.errors import InvalidRequest
from triptych.services.tokenizer.openai_http.body import Body, parsed
from triptych.services.tokenizer.openai_http.door import Door
from triptych.services.tokenizer.openai_http.errors import http_name
from triptych.services.tokenizer.openai_http.logprobs import Json
from triptych.services.tokenizer.openai_http.messages import Messages, Tools, message_of, tool_of
from triptych.services.tokenizer.openai_http.metrics import Metrics
from triptych.services.tokenizer.openai_http.openapi import NO_SUCH, NOT_READY, takes
from triptych.services.tokenizer.openai_http.route import router
from triptych.services.tokenizer.validation import (
    check_model,
    check_size,
    check_token_ids,
)
from triptych.v1 import inference_pb2

_NAMES = {"text": "prompt", "token_ids": "tokens.", "tools": "tools[].function."}
"""What is called otherwise than in gRPC."""


@contextmanager
def _named_as_here() -> Iterator[None]:
    """Errors of gRPC's fields, as errors of this API's."""
    try:
        yield
    except InvalidRequest as error:
        raise type(error)(http_name(error.field, _NAMES), error.description) from error


class TokenizeRequest(Body):
    """A text, or a chat to render first; one of them."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None
    tools: Tools | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """Token ids."""

    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]
    skip_special_tokens: bool | None = None


def info_routes(door: Door, metrics: Metrics) -> APIRouter:
    """Everything that is asked about the engine."""
    routes = router("engine")
    generation = door.generation
    created = int(time.time())

    def model(name: str) -> Json:
        facts = generation.facts()
        return {
            "id": name, "object": "model", "created": created, "owned_by": "triptych",
            "root": generation.names[0], "parent": None, "max_model_len": facts.max_model_len,
        }  # fmt: skip

    @routes.get("/v1/models")
    async def models() -> Response:
        """The served model, once for each of its names."""
        return JSONResponse({"object": "list", "data": [model(name) for name in generation.names]})

    @routes.get("/v1/models/{name:path}", responses=NO_SUCH)
    async def one_model(name: str) -> Response:
        """One of them."""
        check_model(name, generation.names)
        return JSONResponse(model(name))

    @routes.post("/tokenize", **takes(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """The token ids of a text or a chat."""
        body = await door.body(request)
        fields = parsed(TokenizeRequest, body)
        asked = tokenize_request(fields)
        with door.admission.admit(len(body)), _named_as_here():
            ids = (await generation.tokenized(asked)).tolist()
        strings = [generation.tokenizer.token_text(each) for each in ids]
        limit = generation.facts().max_model_len
        answer = {
            "count": len(ids), "max_model_len": limit, "tokens": ids,
            "token_strs": strings if fields.return_token_strs else None,
        }  # fmt: skip
        return _json(answer)

    @routes.post("/detokenize", **takes(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        body = await door.body(request)
        fields = parsed(DetokenizeRequest, body)
        check_model(fields.model or "", generation.names)
        with door.admission.admit(len(body)), _named_as_here():
            facts = generation.facts()
            check_size(len(fields.tokens), "token_ids", facts.max_model_len)
            ids = check_token_ids(_u32(fields.tokens), "token_ids", facts.vocabulary_size)
            skip = bool(fields.skip_special_tokens)
            return _json({"prompt": await generation.prompts.detokenize(ids, skip)})

    @routes.get("/health", response_class=Response, responses=NOT_READY)
    async def health() -> Response:
        """200 while a step can be made, else 503 and why not: what grpc.health.v1 says."""
        reason = door.reason()
        return JSONResponse({"reason": reason}, 503) if reason else Response()

    @routes.get("/ready", responses=NOT_READY)
    async def ready() -> Response:
        """The same, with what it is made of."""
        stats = door.stats().tokenizer
        reason = door.reason()
        answer = {
            "ready": not reason,
            "reason": reason,
            "scheduler_connected": stats.scheduler_connected,
            "requests_running": stats.requests_running,
        }
        return JSONResponse(answer, 503 if reason else 200)

    @routes.get("/version")
    async def version() -> Response:
        """The engine's version."""
        return JSONResponse({"version": door.stats().process.version})

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def measured() -> Response:
        """Counters and histograms for Prometheus, of this process and of the scheduler."""
        page = metrics.page(door.stats(), await door.scheduler_stats())
        return Response(page, media_type=metrics.content_type)

    return routes


def tokenize_request(fields: TokenizeRequest) -> inference_pb2.TokenizeRequest:
    """As gRPC has it. Raises InvalidRequest."""
    if (fields.prompt is None) == (fields.messages is None):
        raise InvalidRequest("prompt", "exactly one of prompt and messages is needed")
    request = inference_pb2.TokenizeRequest(model=fields.model or "", text=fields.prompt or "")
    for index, message in enumerate(fields.messages or ()):
        request.messages.append(message_of(message, f"messages[{index}]"))
    if fields.messages is not None and not fields.messages:
        raise InvalidRequest("messages", "is empty; at least 1 message is needed")
    request.tools.extend(tool_of(each.function) for each in fields.tools or ())
    if fields.chat_template_kwargs:
        request.chat_template_kwargs = to_json(
            fields.chat_template_kwargs, inf_nan_mode="strings"
        ).decode()
    for name in ("add_special_tokens", "add_generation_prompt", "continue_final_message"):
        value = getattr(fields, name)
        if value is not None:
            setattr(request, name, value)
    return request


def _u32(ids: list[int]) -> list[int]:
    for index, value in enumerate(ids):
        if not 0 <= value < 1 << 32:
            raise InvalidRequest(f"tokens[{index}]", f"{value!r:.40} is no token id")
    return ids


def _json(answer: Json) -> Response:
    return Response(to_json(answer), media_type="application/json")
