"""Clients of bench-frontend, in a process of their own: many streams of one kind.

    python -P bench/stream_clients.py --kind grpc|session|sse --address HOST:PORT --streams N
                                      --counters FILE --reader I [--tokens N]

`grpc`: a Generate call each, on a connection of its own. `session`: requests of one Session. `sse`:
a streamed /v1/completions each, on a connection of its own. What comes is counted in FILE
(stream_counters). With --tokens the streams end and are checked: every one must bring so many
tokens, the text of them, and one end. Otherwise they run until this process is ended.

It does as little as it can for a message, since it shares the cores with what it measures.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import grpc
import uvloop

from triptych.v1 import common_pb2, inference_pb2, inference_pb2_grpc

sys.path.insert(0, str(Path(__file__).parent))
from stream_counters import Occurrences, StreamCounters

WORD = " the"
"""The text of the one token that every answer consists of."""
PROMPT = "Count the lighthouses."
ENDLESS = 1 << 20
_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # a connection each
    ("grpc.max_receive_message_length", 64 << 20),
]


@dataclass(slots=True)
class Tally:
    """What the streams of this process have brought."""

    counters: StreamCounters
    reader: int
    opened: int = 0

    def add(self, tokens: int, messages: int = 1) -> None:
        self.counters.add(self.reader, tokens, messages)

    def open(self) -> None:
        """One more stream has had a token."""
        self.opened += 1
        self.counters.opened(self.reader, self.opened)


@dataclass(frozen=True, slots=True)
class Load:
    """What the command line says."""

    address: str
    streams: int
    tokens: int
    tally: Tally

    @property
    def whole(self) -> bool:
        return self.tokens != ENDLESS

    def check(self, tokens: int, text: str, ended: bool) -> None:
        """Of a stream that is over. Raises RuntimeError."""
        if tokens != self.tokens or text not in ("", WORD * tokens) or not ended:
            raise RuntimeError(f"a stream brought {tokens} tokens of {self.tokens}, {text[-40:]!r}")

    def request(self) -> inference_pb2.GenerateRequest:
        params = common_pb2.SamplingParams(max_tokens=self.tokens, ignore_eos=True)
        return inference_pb2.GenerateRequest(text=PROMPT, sampling_params=params)


class Received:
    """One stream of GenerateResponses."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._tokens = 0
        self._text: list[str] = []
        self.ended = False

    def take(self, response: inference_pb2.GenerateResponse) -> int:
        """How many tokens it brings."""
        new = len(response.token_ids)
        if not self._tokens:
            self._load.tally.open()
        self._tokens += new
        if self._load.whole:
            self._text.append(response.text)
        if response.finish_reason:
            self.ended = True
            self._load.check(self._tokens, "".join(self._text), ended=True)
        return new


async def generate(load: Load) -> None:
    """A Generate call each."""

    async def one() -> None:
        async with grpc.aio.insecure_channel(load.address, options=_OPTIONS) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            received = Received(load)
            call = stub.Generate(load.request())
            while isinstance(each := await call.read(), inference_pb2.GenerateResponse):
                load.tally.add(received.take(each))
            if not received.ended:
                raise RuntimeError("a stream ended without a finish reason")

    await asyncio.gather(*[one() for _ in range(load.streams)])


async def session(load: Load) -> None:
    """Requests of one Session."""

    async def starts() -> AsyncIterator[inference_pb2.SessionRequest]:
        for number in range(load.streams):
            start = inference_pb2.SessionStart(id=number, generate=load.request())
            yield inference_pb2.SessionRequest(start=start)

    received = [Received(load) for _ in range(load.streams)]
    async with grpc.aio.insecure_channel(load.address, options=_OPTIONS) as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Session(starts())
        while isinstance(each := await call.read(), inference_pb2.SessionResponse):
            load.tally.add(sum(received[event.id].take(event.output) for event in each.events))
    if not all(each.ended for each in received):
        raise RuntimeError("a request of the session did not end")


class EventStream(asyncio.Protocol):
    """Sends one request and counts the words and events of its answer as bytes."""

    def __init__(self, load: Load, request: bytes, ended: "asyncio.Future[None]") -> None:
        self._load = load
        self._request = request
        self._ended = ended
        self._events, self._words = Occurrences(b"data: "), Occurrences(WORD.encode())
        self._tokens = 0
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        cast(asyncio.Transport, transport).write(self._request)  # uvloop's is registered as none

    def data_received(self, data: bytes) -> None:
        """Count."""
        tokens = self._words.count(data)
        if tokens and not self._tokens:
            self._load.tally.open()
        self._tokens += tokens
        self._load.tally.add(tokens, self._events.count(data))
        self._tail = data if len(data) >= 64 else self._tail[-64:] + data

    def connection_lost(self, error: Exception | None) -> None:
        """The answer says Connection: close."""
        try:
            self._load.check(self._tokens, "", ended=b"data: [DONE]" in self._tail)
        except RuntimeError as failure:
            self._ended.set_exception(failure)
        else:
            self._ended.set_result(None)


async def events(load: Load) -> None:
    """A streamed completion each."""
    body = json.dumps(
        {"prompt": PROMPT, "max_tokens": load.tokens, "ignore_eos": True, "stream": True}
    )
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {load.address}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    host, _, port = load.address.rpartition(":")
    ends: list[asyncio.Future[None]] = [loop.create_future() for _ in range(load.streams)]
    for ended in ends:
        opened = partial(EventStream, load, (head + body).encode(), ended)
        await loop.create_connection(opened, host, int(port))
    await asyncio.gather(*ends)


KINDS = {"grpc": generate, "session": session, "sse": events}


def main() -> int:
    """Run the streams."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kind", required=True, choices=list(KINDS))
    parser.add_argument("--address", required=True)
    parser.add_argument("--streams", required=True, type=int)
    parser.add_argument("--counters", required=True, type=Path)
    parser.add_argument("--reader", required=True, type=int)
    parser.add_argument("--tokens", type=int, default=ENDLESS)
    args = parser.parse_args()
    tally = Tally(StreamCounters(args.counters), args.reader)
    load = Load(args.address, args.streams, args.tokens, tally)
    uvloop.run(KINDS[args.kind](load))
    return 0


if __name__ == "__main__":
    sys.exit(main())
