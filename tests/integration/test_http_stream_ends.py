"""How a stream ends, read from the socket by hand and by the `openai` package (R34)."""

import asyncio
import json
from pathlib import Path

import openai
import pytest

from http_bench import HttpBench, Json, data_of, http_bench
from tokenizer_bench import run, until
from triptych.services.tokenizer.server import LoadedModel

CHAT: Json = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "stream": True}


class RawStream:
    """A POST over a bare connection: `head` and `text` are what has come so far."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.head = b""
        self.text = ""
        self.complete = False

    @classmethod
    async def post(cls, b: HttpBench, path: str, body: Json) -> "RawStream":
        reader, writer = await asyncio.open_connection(*b.host_and_port)
        content = json.dumps(body).encode()
        writer.write(
            b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (path.encode(), len(content), content)
        )
        made = cls(reader, writer)
        made.head = (await reader.readuntil(b"\r\n\r\n")).lower()
        return made

    async def chunk(self) -> bool:
        """Read one chunk; False at the end of the body."""
        size = int((await self._reader.readline()).strip(), 16)
        data = await self._reader.readexactly(size + 2)
        assert data.endswith(b"\r\n")
        self.text += data[:-2].decode()
        self.complete = size == 0
        return not self.complete

    def close(self) -> None:
        self._writer.close()


def test_a_whole_stream(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with http_bench(model, tmp_path / "run", b"abcdefghi") as b:
            stream = await RawStream.post(b, "/v1/chat/completions", CHAT)
            assert stream.head.startswith(b"http/1.1 200")
            assert b"content-type: text/event-stream" in stream.head
            while await stream.chunk():
                pass
            stream.close()
            assert stream.text.endswith("\n\ndata: [DONE]\n\n")
            assert stream.text.count("[DONE]") == 1
            choices = [chunk["choices"][0] for chunk in data_of(stream.text)[:-1]]
            assert choices[0]["delta"]["role"] == "assistant"
            assert choices[-1]["delta"] == {}
            reasons = [choice["finish_reason"] for choice in choices]
            assert reasons == [None] * (len(choices) - 1) + ["length"]
            assert None not in [value for c in choices for value in c["delta"].values()]

    run(scenario)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_an_engine_that_fails_after_three_tokens(
    model: LoadedModel, tmp_path: Path, path: str
) -> None:
    async def scenario() -> None:
        async with http_bench(model, tmp_path / "run", b"abcdefghi", interval=0.01) as b:
            body = {**CHAT, "prompt": "hi"}
            del body["messages" if path == "/v1/completions" else "prompt"]
            b.scheduler.paused = True
            asked = asyncio.create_task(RawStream.post(b, path, body))
            await until(lambda: bool(b.scheduler.jobs))
            (job,) = b.scheduler.jobs.values()
            job.tokens = b"abc"  # then it waits
            b.scheduler.paused = False
            stream = await asked
            while text_of(stream.text) != "abc":
                assert await stream.chunk()
            b.scheduler.failing_choice = 0
            job.tokens = b"abcdefghi"
            async with asyncio.timeout(30):
                while await stream.chunk():
                    pass
            stream.close()
            *chunks, last = data_of(stream.text)
            assert set(last) == {"error"}
            assert last["error"]["code"] == "request_failed"
            assert sum("error" in chunk for chunk in chunks) == 0
            assert all(c["choices"][0]["finish_reason"] is None for c in chunks)
            assert "[DONE]" not in stream.text  # it would look whole
            assert stream.complete
            await b.behind.idle()

    run(scenario)


def test_the_package_raises_what_broke(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with http_bench(model, tmp_path / "run", b"abc") as b:  # then it waits
            host, port = b.host_and_port
            client = openai.AsyncOpenAI(
                base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0
            )
            stream = await client.completions.create(
                model="tiny", prompt="hi", max_tokens=9, stream=True
            )
            text = ""
            with pytest.raises(openai.APIError) as caught:  # noqa: PT012 - at some chunk
                async for chunk in stream:
                    text += chunk.choices[0].text
                    if text == "abc":
                        b.scheduler.failing_choice = 0
                        (job,) = b.scheduler.jobs.values()
                        job.tokens = b"abcd"
            await client.close()
            assert text == "abc"
            assert caught.value.code == "request_failed"

    run(scenario)


def test_what_is_wrong_before_the_headers(model: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with http_bench(model, tmp_path / "run", b"abc", max_model_len=64) as b:
            for change in ({"n": 0}, {"messages": [{"role": "user", "content": "x" * 99}]}):
                stream = await RawStream.post(b, "/v1/chat/completions", {**CHAT, **change})
                stream.close()
                assert stream.head.startswith(b"http/1.1 400")
                assert b"content-type: application/json" in stream.head

    run(scenario)


def text_of(stream: str) -> str:
    """The text of the events that are whole."""
    whole = stream[: stream.rfind("\n\n") + 2] if "\n\n" in stream else ""
    choices = [chunk["choices"][0] for chunk in data_of(whole) if chunk]
    return "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)
