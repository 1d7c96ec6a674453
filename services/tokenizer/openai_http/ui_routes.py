"""/ui: a page to chat with the model and to watch the engine. Files of ui/, served as they are.

The page may load nothing but these files, run no script that is not one of them, talk to nobody
but this address, and be framed by nobody; markup is never made from text (Trusted Types).
"""

from hashlib import sha256
from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response

from triptych.services.tokenizer.openai_http.route import router

_PACKAGE = "triptych.services.tokenizer.openai_http"
_INDEX = "index.html"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # Kept, and asked about each time: after an upgrade no old script meets a new page.
    "cache-control": "no-cache",
}


class _File:
    """One file, in memory."""

    def __init__(self, name: str, body: bytes) -> None:
        self._body = body
        self._tag = f'"{sha256(body).hexdigest()[:20]}"'
        self._type = _TYPES[name.rpartition(".")[2]]

    def answer(self, request: Request) -> Response:
        """The file, or 304 to whoever has it."""
        headers = {**_HEADERS, "etag": self._tag}
        known = request.headers.get("if-none-match", "")
        if self._tag in (each.strip().removeprefix("W/") for each in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(self._body, headers=headers, media_type=self._type)


def ui_routes() -> APIRouter:
    """The page at /ui, its other files below."""
    routes = router("page")
    pages = {
        each.name: _File(each.name, each.read_bytes())
        for each in (files(_PACKAGE) / "ui").iterdir()
        if each.name.rpartition(".")[2] in _TYPES
    }

    async def page(request: Request) -> Response:
        """The page."""
        return pages[_INDEX].answer(request)

    async def with_slash() -> Response:
        """Its files are found beside /ui only."""
        return RedirectResponse("../ui", 308)

    async def part(name: str, request: Request) -> Response:
        """Scripts, style, icon."""
        if name not in pages or name == _INDEX:
            raise HTTPException(404, "no such file")
        return pages[name].answer(request)

    for path, handler in (("/ui", page), ("/ui/", with_slash), ("/ui/{name}", part)):
        routes.add_api_route(path, handler, methods=["GET", "HEAD"], include_in_schema=False)
    return routes
