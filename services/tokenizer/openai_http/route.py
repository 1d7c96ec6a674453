"""A route whose every failure is an answer in OpenAI's shape."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response

from triptych.services.tokenizer.openai_http.errors import HttpError, http_error


class _Route(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answered(request: Request) -> Response:
            try:
                return await handle(request)
            except HTTPException:
                raise
            except Exception as error:  # the top of the request: what is no RequestError is logged
                return error_response(http_error(error))

        return answered


def router(tag: str) -> APIRouter:
    """A router of such routes."""
    return APIRouter(route_class=_Route, tags=[tag])


def error_response(error: HttpError) -> Response:
    """An error as a whole answer."""
    return Response(error.body(), error.status, error.headers(), "application/json")
