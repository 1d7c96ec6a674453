"""The FastAPI application: routes, and every error in OpenAI's shape."""

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from triptych.services.tokenizer.openai_http.docs_page import add_docs
from triptych.services.tokenizer.openai_http.door import Door
from triptych.services.tokenizer.openai_http.errors import HttpError
from triptych.services.tokenizer.openai_http.generate_routes import generate_routes
from triptych.services.tokenizer.openai_http.info_routes import info_routes
from triptych.services.tokenizer.openai_http.metrics import Metrics
from triptych.services.tokenizer.openai_http.openapi import describe
from triptych.services.tokenizer.openai_http.route import error_response
from triptych.services.tokenizer.openai_http.ui_routes import ui_routes

_DESCRIPTION = """OpenAI's API, with vLLM's extra fields. null means absent; a field that is not
known is ignored (and logged once); a wrong one is refused with 400 and named in `param`."""


def make_app(door: Door, version: str) -> FastAPI:
    """The application for one tokenizer process."""
    app = FastAPI(
        title="Triptych",
        version=version,
        description=_DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    metrics = Metrics(door.generation.names[0])
    door.generation.observer = metrics
    app.include_router(generate_routes(door))
    app.include_router(info_routes(door, metrics))
    app.include_router(ui_routes())
    app.add_exception_handler(HTTPException, _no_route)
    describe(app)
    add_docs(app)
    return app


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for these"
    said = f"{request.method} {request.url.path:.200}: {error.detail}"
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "refused")
    answer = error_response(HttpError(error.status_code, said, code=code))
    answer.headers.update(error.headers or {})
    return answer
