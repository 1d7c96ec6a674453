"""Requests that come when they come: an open loop of Generate calls, and a closed one beside it.

In an open loop arrivals do not wait for answers, so that a service that falls behind is asked no
less. The moments are drawn before (a Poisson process).
"""

import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from triptych.v1 import inference_pb2, inference_pb2_grpc

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests" / "support")]
from overload_periods import Call
from workload import random_ids

from engine import generate_request

_CHANNELS = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """Every request's: prompt tokens, all its own, and output tokens."""

    prompt: int
    output: int


async def open_loop(address: str, moments: Sequence[float], shape: Shape, seed: str) -> list[Call]:
    """Ask at those moments. Raises grpc.RpcError for what is neither answered nor refused."""
    async with Channels(address) as stubs:
        prompts = _requests(len(moments), shape, seed)
        start = time.perf_counter()
        tasks = []
        for i, at in enumerate(moments):
            wait = start + at - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(_call(stubs.stub(i), prompts[i], start + at, shape)))
        return list(await asyncio.gather(*tasks))


async def closed_loop(
    address: str, clients: int, seconds: float, shape: Shape, seed: str
) -> list[Call]:
    """So many clients that ask again as soon as they are answered, for so long."""
    async with Channels(address) as stubs:
        until = time.perf_counter() + seconds

        async def client(number: int) -> list[Call]:
            calls: list[Call] = []
            while (now := time.perf_counter()) < until:
                (request,) = _requests(1, shape, f"{seed} {number} {len(calls)}")
                calls.append(await _call(stubs.stub(number), request, now, shape))
            return calls

        every = await asyncio.gather(*[client(number) for number in range(clients)])
        return [call for calls in every for call in calls]


class Channels:
    """A few connections to one address, used in turn: a context."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channels: list[grpc.aio.Channel] = []

    async def __aenter__(self) -> "Channels":
        for _ in range(_CHANNELS):
            options = [("grpc.use_local_subchannel_pool", 1)]
            channel = grpc.aio.insecure_channel(self._address, options=options)
            self._channels.append(channel)
            await channel.channel_ready()
        self._stubs = [inference_pb2_grpc.InferenceServiceStub(each) for each in self._channels]
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in self._channels:
            await channel.close()

    def stub(self, number: int) -> "inference_pb2_grpc.InferenceServiceAsyncStub":
        """One of them."""
        return self._stubs[number % _CHANNELS]


def _requests(count: int, shape: Shape, seed: str) -> list[inference_pb2.GenerateRequest]:
    dice = random.Random(seed)
    return [
        generate_request(
            random_ids(dice, shape.prompt),
            max_tokens=shape.output,
            temperature=0.0,
            ignore_eos=True,
        )
        for _ in range(count)
    ]


async def _call(
    stub: "inference_pb2_grpc.InferenceServiceAsyncStub",
    request: inference_pb2.GenerateRequest,
    due: float,
    shape: Shape,
) -> Call:
    sent, first, tokens = time.perf_counter(), 0.0, 0
    try:
        async for response in stub.Generate(request):
            if response.token_ids and not tokens:
                first = time.perf_counter()
            tokens += len(response.token_ids)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED or tokens:
            raise
        return Call(due, sent, 0.0, time.perf_counter(), 0, refused=True)
    if tokens != shape.output:
        raise RuntimeError(f"{tokens} tokens came, {shape.output} were asked for")
    return Call(due, sent, first, time.perf_counter(), tokens, refused=False)
