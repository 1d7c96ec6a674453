"""A request's body: bounded, strict JSON, checked against a model of its fields.

Strict: no numbers in quotes, no NaN, nothing nested deeper than the parser's bound (200 levels).
null means absent. Fields that a model does not have are ignored, and each is logged once.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Mapping
from typing import ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect

from triptych.engine_core.errors import InvalidRequest
from triptych.services.tokenizer.openai_http.errors import HttpRefusal

BODY_SECONDS = 60
MAX_WEIGHT = 2_000_000
"""Of a body's JSON: a list or an object counts 40, a string 12, any other value 1. Parsing holds
the event loop, about 0.1 microseconds for 1, so that this is 0.2 s."""
_CONTAINER_WEIGHT, _STRING_WEIGHT = 40, 12
_MAX_LOGGED_NAMES = 256
_FIELD = re.compile(r"[a-z_][a-z0-9_]*")
_TYPES = frozenset(("str", "int", "float", "bool", "list", "dict", "none"))

_log = logging.getLogger(__name__)
_logged: set[str] = set()


class Body(BaseModel):
    """Fields of a JSON object. A subclass names in `REFUSED` what it must not ignore, and why."""

    model_config = ConfigDict(
        extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=(), frozen=True
    )
    REFUSED: ClassVar[Mapping[str, str]] = {}


BodyT = TypeVar("BodyT", bound=Body)


def declared_size(headers: Mapping[str, str], most: int) -> int:
    """Bytes that the body is going to have; `most` where nobody says. Raises HttpRefusal: 413
    above `most`, 415 for what is no JSON."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise HttpRefusal(
            415, f"content-type is {kind!r:.80}, it must be application/json", "unsupported_media"
        )
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > most:
        raise _too_large(length, most)
    return int(length) if length.isdecimal() else most


async def read_body(chunks: AsyncIterator[bytes], most: int) -> bytes:
    """The whole body. Raises HttpRefusal: 413 above `most` bytes, 408 where it does not come, 400
    where the client hangs up, which nobody hears."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in chunks:
                body += chunk
                if len(body) > most:
                    raise _too_large(f"at least {len(body)}", most)
    except TimeoutError:
        raise HttpRefusal(
            408, f"the body did not come within {BODY_SECONDS} s", "request_timeout"
        ) from None
    except ClientDisconnect:
        raise HttpRefusal(400, "the client hung up within the body", "body_cut") from None
    return bytes(body)


def parsed(model: type[BodyT], body: bytes) -> BodyT:
    """The fields. Raises InvalidRequest that names the first wrong one."""
    _check_weight(body)
    try:
        fields = model.model_validate_json(body)
    except ValidationError as error:
        raise _invalid(error) from None
    _look_at_unknown(fields)
    return fields


def _check_weight(body: bytes) -> None:
    """Before it is parsed, in a few passes that run at memory's speed."""
    if body.count(b",") + body.count(b"[") + body.count(b"{") < MAX_WEIGHT // _CONTAINER_WEIGHT:
        return
    bare = body.replace(rb"\\", b"").replace(b'\\"', b"")
    strings = bare.count(b'"') // 2
    weight = strings * _STRING_WEIGHT
    if weight <= MAX_WEIGHT:
        outside = b"".join(bare.split(b'"')[::2])
        containers = outside.count(b"[") + outside.count(b"{")
        weight += outside.count(b",") + containers * _CONTAINER_WEIGHT
    if weight > MAX_WEIGHT:
        raise InvalidRequest(
            "body",
            "too many parts for one request: it may have about 50000 lists and objects, 160000"
            " strings or 2000000 numbers",
        )


def _too_large(size: str, most: int) -> HttpRefusal:
    return HttpRefusal(
        413, f"the body has {size} bytes, more than http_max_body_bytes {most}", "body_too_large"
    )


def _invalid(error: ValidationError) -> InvalidRequest:
    errors = error.errors(include_url=False, include_context=False)
    first = errors[0]
    if first["type"] == "json_invalid":
        return InvalidRequest("body", first["msg"])
    # Each branch of a union says something; what looked deepest knows best.
    about = [each for each in errors[:8] if each["loc"][:1] == first["loc"][:1]]
    field = max(map(_field_of, about), key=len)
    said = dict.fromkeys(_said(each) for each in about if _field_of(each) == field)
    return InvalidRequest(field or "body", ", or ".join(said))


def _said(error: ErrorDetails) -> str:
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return message[:1].lower() + message[1:]


def _field_of(error: ErrorDetails) -> str:
    field = ""
    for part in error["loc"]:
        if isinstance(part, int):
            field += f"[{part}]"
        elif _FIELD.fullmatch(part) and part not in _TYPES:
            field += f".{part}" if field else part
    return field


def _look_at_unknown(fields: Body) -> None:
    for name, value in (fields.model_extra or {}).items():
        if value is None or value is False:
            continue
        if (why := fields.REFUSED.get(name)) is not None:
            raise InvalidRequest(name, why)
        if name not in _logged and len(_logged) < _MAX_LOGGED_NAMES:
            _logged.add(name)
            _log.warning("a field that is not known was ignored", extra={"field": name[:80]})
