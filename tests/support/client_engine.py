"""One engine for the clients of others: a scripted chat model with tools and thoughts over HTTP.

The model follows a script; the length of the prompt picks the script.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import httpx
from pydantic import BaseModel, Field

from chat_calls import CITY_SCHEMA, hermes_call
from chat_folders import write_chat_tokenizer
from engine import Engine, running_engine
from scripted_models import T1_EOS, write_s2_positions
from segments import Segments

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}<|im_end|>{% endfor %}"
)
CITY = {"city": "Zürich"}
CALLS = [("get_weather", CITY), ("now", {})]
HELLO = "Grüezi 世界!"
THOUGHT, ANSWER = "hm, é", "It is warm."
_TEXTS = {
    "hello": HELLO,
    "call": f"Well.\n{hermes_call('get_weather', CITY)}\n{hermes_call('now', {})}",
    "thoughts": f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}",
}
_SEGMENTS = Segments({name: [*text.encode(), T1_EOS] for name, text in _TEXTS.items()}, first=64)
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {
        "name": "get_weather", "description": "The weather", "parameters": CITY_SCHEMA}},
    {"type": "function", "function": {
        "name": "now", "description": "The time of day",
        "parameters": {"type": "object", "properties": {}}}},
]  # fmt: skip
CONTEXT = 1024


class Weather(BaseModel):
    """The weather somewhere."""

    city: Literal["Rome", "Oslo"]
    degrees: int = Field(ge=0, le=9)


@contextmanager
def client_engine(folder: Path) -> Iterator[Engine]:
    """Its model's name is "model"; idle again at the end."""
    write_chat_tokenizer(folder / "model", TEMPLATE)
    write_s2_positions(folder / "model", _SEGMENTS.script, num_positions=CONTEXT)
    flags = ("--kv-cache-memory", "16MiB", "--cpu-threads", "1", "--tool-call-parser", "hermes",
             "--reasoning-parser", "qwen3")  # fmt: skip
    with running_engine(folder / "model", folder / "run", *flags) as engine:
        health = httpx.get(f"http://{engine.http_address}/health", timeout=20)
        assert health.status_code == 200
        yield engine
        engine.wait_idle()


def content_for(script: str) -> str:
    """The content of a single message after which the model follows the named script."""
    return "." * (len(_SEGMENTS.prompt(script)) - 2)


def prompt_for(script: str) -> str:
    """The same for a text completion."""
    return "." * len(_SEGMENTS.prompt(script))
