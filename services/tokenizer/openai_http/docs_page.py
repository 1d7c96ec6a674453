"""The page at /docs: the OpenAPI description as one page that needs no script and no other server.

Swagger's page, FastAPI's own, loads its scripts from a public server: offline it is empty.
"""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import FastAPI
from starlette.responses import HTMLResponse, Response

Described = Mapping[str, Any]  # parts of an OpenAPI document

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color-scheme: light dark; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; padding: .25rem .75rem .25rem 0; vertical-align: top;
  border-bottom: 1px solid #8884; overflow-wrap: anywhere; }
"""


def add_docs(app: FastAPI) -> None:
    """Serve the page."""

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(page(app.openapi()), headers={"content-security-policy": _POLICY})


def page(document: Described) -> str:
    """The description as HTML."""
    info = document["info"]
    title = escape(f"{info['title']} {info['version']}")
    schemas = document["components"]["schemas"]
    return "".join(
        [
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<style>{_STYLE}</style><h1>{title}</h1><p>{escape(info['description'])}</p>",
            '<p>As <a href="openapi.json">openapi.json</a>.</p><table>',
            *_routes(document["paths"]),
            "</table>",
            *(part for name in sorted(schemas) for part in _schema(name, schemas[name])),
            "</html>",
        ]
    )


def _routes(paths: Described) -> Iterator[str]:
    yield "<tr><th>route<th>what<th>body"
    for path, methods in paths.items():
        for method, route in methods.items():
            text = escape(route.get("description") or route.get("summary") or "")
            media = route.get("requestBody", {}).get("content", {}).get("application/json", {})
            body = _type(media["schema"]) if "schema" in media else ""
            yield f"<tr><td>{method.upper()} {escape(path)}<td>{text}<td>{body}"


def _schema(name: str, schema: Described) -> Iterator[str]:
    about = escape(schema.get("description") or "")
    yield f'<h2 id="{escape(name)}">{escape(name)}</h2><p>{about}</p><table>'
    needed = schema.get("required", ())
    for field, each in schema.get("properties", {}).items():
        about = escape(each.get("description") or "")
        must = " (required)" if field in needed else ""
        yield f"<tr><td>{escape(field)}{must}<td>{_type(each)}<td>{about}"
    yield "</table>"


def _type(schema: Described) -> str:
    """A type in a few words, as HTML."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            kinds = dict.fromkeys(map(_type, schema[key]))
            return " or ".join(kind for kind in kinds if kind != "null")
    if "enum" in schema:
        return " or ".join(escape(repr(value)) for value in schema["enum"])
    if "const" in schema:
        return escape(repr(schema["const"]))
    kind = schema.get("type", "anything")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return " or ".join(map(escape, kind)) if isinstance(kind, list) else escape(kind)
