"""The tokenizer service's HTTP door over real sockets, with a scripted scheduler behind it."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from tokenizer_bench import Bench, bench
from triptych.services.tokenizer.server import LoadedModel

Json = dict[str, Any]
USER = {"role": "user", "content": "hi"}


class HttpBench:
    """A client of the door, and the bench behind it."""

    def __init__(self, behind: Bench, client: httpx.AsyncClient) -> None:
        self.behind = behind
        self.scheduler = behind.scheduler
        self.client = client

    async def complete(self, prompt: object = "hi", **body: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"prompt": prompt, **body})

    async def chat(self, **body: Any) -> httpx.Response:
        body = {"messages": [USER], **body}
        return await self.client.post("/v1/chat/completions", json=body)

    @property
    def host_and_port(self) -> tuple[str, int]:
        host, _, port = self.behind.service.stats().tokenizer.http_address.rpartition(":")
        return host, int(port)


def events(text: str) -> list[Json]:
    """The data of a whole stream; asserts that it ends with [DONE]."""
    assert text.endswith("data: [DONE]\n\n"), text[-200:]
    return data_of(text)[:-1]


def data_of(text: str) -> list[Json]:
    """The data of each event, comments left out; [DONE] is an empty one."""
    lines = [block.split("\n") for block in text.split("\n\n") if block]
    data = [line[6:] for block in lines for line in block if line.startswith("data: ")]
    return [json.loads(each) if each != "[DONE]" else {} for each in data]


@asynccontextmanager
async def http_bench(
    model: LoadedModel, folder: Path, script: object = b"abc", **options: Any
) -> AsyncIterator[HttpBench]:
    """As tokenizer_bench.bench, with an HTTP client."""
    async with bench(model, folder, script, http=True, **options) as behind:
        address = behind.service.stats().tokenizer.http_address
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=60) as client:
            yield HttpBench(behind, client)
