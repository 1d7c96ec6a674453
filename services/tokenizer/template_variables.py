"""What a request adds to the variables of the chat template (`chat_template_kwargs`).

Anything may be named but what the service sets itself, or what would mean something to the engines
whose clients send such fields: another template, tokenizing. A template that does not know a name
goes without it, as clients send one form to all models.
"""

import re
from collections.abc import Mapping
from typing import Final

from triptych.engine_core.errors import InvalidRequest
from triptych.services.tokenizer.bounded_json import Json, JsonBounds, NoJson, read_json

FIELD: Final = "chat_template_kwargs"
MAX_VARIABLES = 64
_BOUNDS = JsonBounds(64 << 10, 16)
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_RESERVED = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("chat_template", "conversation", "conversations", "tokenize", "tokenizer"),
        *("padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs", "template_kwargs"),
        *("raise_exception", "strftime_now", "range", "dict", "lipsum", "cycler", "joiner"),
        *("namespace", "self", "loop", "caller", "varargs", "kwargs"),
    }
)


def template_variables(text: str) -> Mapping[str, Json]:
    """The variables from their JSON text, {} for none. Raises InvalidRequest."""
    if not text.strip():
        return {}
    try:
        value = read_json(text, _BOUNDS)
    except NoJson as error:
        raise InvalidRequest(FIELD, str(error)) from error
    if not isinstance(value, dict):
        raise InvalidRequest(FIELD, "it must be a JSON object")
    if len(value) > MAX_VARIABLES:
        raise InvalidRequest(FIELD, f"{len(value)} names, more than {MAX_VARIABLES}")
    for name in value:
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                FIELD, f"{name!r:.80} is not a letter and up to 63 letters, digits or _"
            )
        if name in _RESERVED or name.endswith("_token"):
            raise InvalidRequest(FIELD, f"{name} is set by the service")
    return value
