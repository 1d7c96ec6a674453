"""The OpenAPI description of bodies that are not read by FastAPI itself.

FastAPI would parse without bounds, answer 422 in a shape of its own, and take numbers in quotes.
"""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from triptych.services.tokenizer.openai_http.body import Body

_REF = "#/components/schemas/{model}"
_models: dict[str, type[Body]] = {}

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ERRORS = {
    400: "a field is wrong; `param` names it",
    404: "no such model",
    413: "the body is too large",
    415: "the body is no JSON",
    429: "no room now; Retry-After says when to try again",
    500: "our fault",
    503: "starting, stopping or broken; Retry-After says when to try again",
    504: "a deadline passed",
}

_ERROR_BODY = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}

_WHOLE: dict[str, Any] = {"description": "the answer"}  # FastAPI adds its content
_STREAMED = {
    "description": "the answer, or server-sent events where `stream` is true",
    "content": {"text/event-stream": {}},
}

NO_SUCH: dict[int | str, dict[str, Any]] = {  # FastAPI's type
    "4XX": {"description": _ERRORS[404], "content": _ERROR_BODY}
}
"""For a route with a parameter in its path; "4XX" so that FastAPI adds no 422 of its own."""

NOT_READY: dict[int | str, dict[str, Any]] = {
    503: {
        "description": "no step can be made now; `reason` says why",
        "content": {
            "application/json": {
                "schema": {"type": "object", "properties": {"reason": {"type": "string"}}}
            }
        },
    }
}


def takes(model: type[Body]) -> Any:  # keywords of APIRouter.post, which are many types
    """Describe a route whose body is read with `parsed(model, ...)`."""
    _models[model.__name__] = model
    schema = {"$ref": _REF.format(model=model.__name__)}
    errors = {
        status: {"description": text, "content": _ERROR_BODY} for status, text in _ERRORS.items()
    }
    return {
        "openapi_extra": {
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}
        },
        "responses": {200: _STREAMED if "stream" in model.model_fields else _WHOLE, **errors},
        "response_model": None,
    }


def describe(app: FastAPI) -> None:
    """Add the schemas of all bodies to the app's description, when it is asked for."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(
                title=app.title, version=app.version, description=app.description,
                routes=app.routes, tags=app.openapi_tags,
            )  # fmt: skip
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            schemas["Error"] = ERROR
            for name, model in _models.items():
                schema = model.model_json_schema(ref_template=_REF)
                schemas.update(schema.pop("$defs", {}))
                schemas[name] = schema
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to extend it
