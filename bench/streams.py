"""Generate calls at the same time, from a client in this process, and when their tokens came."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from triptych.v1 import inference_pb2, inference_pb2_grpc

TIMEOUT = 1800.0


@dataclass(frozen=True, slots=True)
class Streamed:
    """A whole answer. `arrivals`: when each message came, and how many tokens there were by then.

    Times are seconds of one clock.
    """

    sent: float
    arrivals: list[tuple[float, int]]
    token_ids: list[int]
    text: str

    @property
    def seconds_to_first(self) -> float:
        """From when the request was sent to its first token."""
        return self.arrivals[0][0] - self.sent


def stream_together(
    address: str, requests: Sequence[inference_pb2.GenerateRequest]
) -> list[Streamed]:
    """All answers, the requests sent at once over one connection.

    Raises RuntimeError for an answer without a token, and grpc.RpcError for a failed one.
    """
    return asyncio.run(_stream_together(address, requests))


async def _stream_together(
    address: str, requests: Sequence[inference_pb2.GenerateRequest]
) -> list[Streamed]:
    async with grpc.aio.insecure_channel(address) as channel:
        await channel.channel_ready()
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        return list(await asyncio.gather(*(_one(stub, request) for request in requests)))


async def _one(
    stub: "inference_pb2_grpc.InferenceServiceAsyncStub", request: inference_pb2.GenerateRequest
) -> Streamed:
    streamed = Streamed(time.perf_counter(), [], [], "")
    pieces = []
    async for response in stub.Generate(request, timeout=TIMEOUT):
        pieces.append(response.text)
        if response.token_ids:
            streamed.token_ids.extend(response.token_ids)
            streamed.arrivals.append((time.perf_counter(), len(streamed.token_ids)))
    if not streamed.arrivals:
        raise RuntimeError("an answer has no token")
    return Streamed(streamed.sent, streamed.arrivals, streamed.token_ids, "".join(pieces))


def seconds_per_token(streams: Sequence[Streamed]) -> float:
    """Seconds that one stream waits for a token, on average, while all of them run.

    Counts from when the last one has its first token to when the first one has its last.
    """
    start = max(stream.arrivals[0][0] for stream in streams)
    end = min(stream.arrivals[-1][0] for stream in streams)
    tokens = sum(_tokens_at(stream, end) - _tokens_at(stream, start) for stream in streams)
    if tokens < len(streams):
        raise RuntimeError(f"{tokens} tokens while all {len(streams)} streams ran: ask for more")
    return (end - start) * len(streams) / tokens


def _tokens_at(stream: Streamed, when: float) -> int:
    return max((count for arrival, count in stream.arrivals if arrival <= when), default=0)
