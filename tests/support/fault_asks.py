"""Requests of every kind as a client sends them, and all that it is told, ready to be compared.

What may differ between two runs (ids that are drawn, times, tokens found in the cache, where a text
is cut into pieces) is left out; everything else is there to the last bit.
"""

import json
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx

from engine import RECONNECT_SOON
from triptych.v1 import common_pb2, inference_pb2, inference_pb2_grpc

Said = dict[str, object]
"""What a client was told, by what it is about."""
Response = inference_pb2.GenerateResponse | inference_pb2.ChatResponse

TIMEOUT = 120.0
"""Seconds for one request; a bound for waits, not a claim."""


class Seen:
    """Counts what clients have been sent, for whoever waits for the right moment."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._counts: dict[str, int] = defaultdict(int)

    def add(self, name: str, tokens: int) -> None:
        with self._changed:
            self._counts[name] += tokens
            self._changed.notify_all()

    @property
    def total(self) -> int:
        """Of all requests."""
        with self._changed:
            return sum(self._counts.values())

    def wait(self, tokens: int, name: str | None = None, timeout: float = TIMEOUT) -> None:
        """Until so many tokens have come, of one request or of all together."""

        def enough() -> bool:
            counted = self._counts.values() if name is None else (self._counts[name],)
            return sum(counted) >= tokens

        with self._changed:
            assert self._changed.wait_for(enough, timeout), dict(self._counts)


class Door:
    """A client's way in: channels to one tokenizer, which outlive it and find it again."""

    def __init__(self, address: str, http_address: str) -> None:
        self.address = address
        self.channel = grpc.insecure_channel(address, options=RECONNECT_SOON)
        self.stub = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.url = f"http://{http_address}"

    def close(self) -> None:
        self.channel.close()


class Told:
    """A gRPC answer as it grows: joins the pieces, and knows what may not follow what."""

    def __init__(self) -> None:
        self._joined: dict[tuple[int, str], Any] = {}
        self._ended: set[int] = set()
        self._usage: common_pb2.Usage | None = None

    def add(self, response: Response) -> None:
        assert self._usage is None, "nothing follows the usage"
        assert response.index not in self._ended, "nothing follows a choice's end"
        self._join(response.index, "text", response.text)
        self._join(response.index, "ids", [*response.token_ids])
        self._join(response.index, "logprobs", _rows(response.logprobs))
        self._join(0, "prompt_logprobs", _rows(response.prompt_logprobs))
        if isinstance(response, inference_pb2.ChatResponse):
            self._join(response.index, "reasoning", response.reasoning)
            for call in response.tool_calls:
                self._join(response.index, f"call {call.index} name", call.name)
                self._join(response.index, f"call {call.index} arguments", call.arguments)
        if response.finish_reason:
            self._ended.add(response.index)
            self._join(response.index, "finish", [response.finish_reason])
        if (reason := response.WhichOneof("stop_reason")) is not None:
            self._join(response.index, reason, [getattr(response, reason)])
        if response.HasField("score"):
            self._join(response.index, "score", [response.score])
        if response.HasField("usage"):
            self._usage = response.usage

    def said(self) -> Said:
        """The whole; the stream has ended."""
        assert self._usage is not None, "the last response carries the usage"
        indices = {index for index, _ in self._joined}
        assert self._ended == indices, "every choice has one end"
        told: Said = {f"choice {i} {what}": value for (i, what), value in self._joined.items()}
        told["prompt tokens"] = self._usage.prompt_tokens
        told["completion tokens"] = self._usage.completion_tokens
        return told

    def _join(self, index: int, what: str, piece: Any) -> None:
        if piece or (index, what) in self._joined or what in ("text", "ids"):
            before = self._joined.get((index, what), type(piece)())
            self._joined[index, what] = before + piece


def _rows(rows: Iterable[common_pb2.TokenLogprob]) -> list[bytes]:
    return [row.SerializeToString(deterministic=True) for row in rows]


@dataclass(frozen=True)
class Ask(ABC):
    """One request."""

    name: str

    @abstractmethod
    def run(self, door: Door, seen: Seen) -> Said:
        """Send it, and return what it was told."""


@dataclass(frozen=True)
class Call(Ask):
    """A Generate or a Chat. `pause`: seconds that the client takes to read a message."""

    request: inference_pb2.GenerateRequest | inference_pb2.ChatRequest
    pause: float = 0.0

    def run(self, door: Door, seen: Seen) -> Said:
        told = Told()
        for response in self.stream(door):
            told.add(response)
            seen.add(self.name, max(1, len(response.token_ids)))
            if self.pause:
                time.sleep(self.pause)
        return told.said()

    def stream(self, door: Door) -> Iterator[Response]:
        if isinstance(self.request, inference_pb2.ChatRequest):
            yield from door.stub.Chat(self.request, timeout=TIMEOUT)
        else:
            yield from door.stub.Generate(self.request, timeout=TIMEOUT)


@dataclass(frozen=True)
class Session(Ask):
    """Several calls multiplexed on one stream; ids count from 1."""

    calls: Sequence[Call]

    def run(self, door: Door, seen: Seen) -> Said:
        told = {index: Told() for index in range(1, len(self.calls) + 1)}
        done = threading.Event()

        def actions() -> Iterator[inference_pb2.SessionRequest]:
            for index, call in enumerate(self.calls, 1):
                start = inference_pb2.SessionStart(id=index)
                if isinstance(call.request, inference_pb2.ChatRequest):
                    start.chat.CopyFrom(call.request)
                else:
                    start.generate.CopyFrom(call.request)
                yield inference_pb2.SessionRequest(start=start)
            done.wait(TIMEOUT)

        open_calls = set(told)
        try:
            for response in door.stub.Session(actions(), timeout=TIMEOUT):
                for event in response.events:
                    assert not event.HasField("error"), event.error.message
                    part = event.chat if event.HasField("chat") else event.output
                    told[event.id].add(part)
                    seen.add(self.name, max(1, len(part.token_ids)))
                    if part.HasField("usage"):
                        open_calls.discard(event.id)
                if not open_calls:
                    done.set()
        finally:
            done.set()
        return {
            f"{self.calls[index - 1].name}: {what}": value
            for index, each in told.items()
            for what, value in each.said().items()
        }


@dataclass(frozen=True)
class Http(Ask):
    """A POST of OpenAI's API, streamed where its body says so."""

    path: str
    body: Mapping[str, Any] = field(default_factory=dict)

    def run(self, door: Door, seen: Seen) -> Said:
        with httpx.Client(base_url=door.url, timeout=TIMEOUT) as client:
            if not self.body.get("stream"):
                reply = client.post(self.path, json=self.body)
                assert reply.status_code == 200, reply.text
                seen.add(self.name, 1)
                return _told_by([reply.json()])
            return _told_by(self._chunks(client, seen))

    def _chunks(self, client: httpx.Client, seen: Seen) -> Iterator[dict[str, Any]]:
        ended = 0
        with client.stream("POST", self.path, json=self.body) as reply:
            assert reply.status_code == 200, reply.read()
            for line in _lines(reply.iter_bytes()):
                if not line.startswith(b"data:"):
                    continue
                assert not ended, "nothing follows [DONE]"
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    ended += 1
                    continue
                seen.add(self.name, 1)
                yield json.loads(data)
        assert ended == 1, "the stream ends with [DONE]"


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """As server-sent events have them: httpx's lines end at other characters too."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
    assert not rest, "the last line is whole"


_DRAWN = {"id", "created", "system_fingerprint"}
_OF_THE_CACHE = {"cached_tokens"}
_ENDS = {"finish_reason", "stop_reason"}
_SAME_EACH_TIME = {"role", "type", "object", "model", "index"}


def _told_by(chunks: Iterable[dict[str, Any]]) -> Said:
    """The bodies of an answer, each string and list joined by where it stands."""
    told: Said = {}
    for chunk in chunks:
        assert "error" not in chunk, chunk
        for choice in chunk.get("choices", ()):
            _join_json(told, f"choice {choice['index']}", choice)
        _join_json(told, "", {key: chunk[key] for key in ("model", "usage") if key in chunk})
    return told


def _join_json(told: Said, place: str, value: Any) -> None:
    name = place.rpartition(".")[2]
    if isinstance(value, dict):
        for key, part in value.items():
            if key not in _DRAWN | _OF_THE_CACHE:
                _join_json(told, f"{place}.{key}", part)
    elif isinstance(value, list) and value and isinstance(value[0], dict) and "index" in value[0]:
        for part in value:
            _join_json(told, f"{place}.{part['index']}", part)
    elif value is None:
        return
    elif name in _ENDS:
        assert place not in told, f"a second {place}"
        told[place] = value
    elif name not in _SAME_EACH_TIME and isinstance(value, str | list):
        before: Any = told.get(place, type(value)())
        told[place] = before + value
    else:
        assert told.setdefault(place, value) == value, (place, told[place], value)


def first_difference(expected: Said, got: Said) -> str | None:
    """In words; None where they are equal."""
    for what in sorted({*expected, *got}):
        one, other = expected.get(what), got.get(what)
        if one == other and type(one) is type(other):
            continue
        if isinstance(one, str | list) and isinstance(other, str | list):
            pairs = enumerate(zip(one, other, strict=False))
            at = next((k for k, (a, b) in pairs if a != b), min(len(one), len(other)))
            return (
                f"{what}: from {at} on {one[at : at + 20]!r} undisturbed, {other[at : at + 20]!r}"
                f" here (lengths {len(one)}, {len(other)})"
            )
        return f"{what}: {one!r} undisturbed, {other!r} here"
    return None
