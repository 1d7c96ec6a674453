"""Workloads against our engine: a client of the public gRPC port, in this process."""

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from triptych.v1 import inference_pb2_grpc

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests" / "support")]
from workload import Request, Timeline

from engine import generate_request

TIMEOUT = 1800.0


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """One greedy answer, its first token `seconds` after the prompt was sent.

    `cached_tokens` of the prompt were found in the prefix cache.
    """

    token_ids: list[int]
    seconds: float
    cached_tokens: int


def serve_requests(address: str, requests: Sequence[Request], concurrency: int) -> list[Timeline]:
    """Stream every request's answer, `concurrency` open at a time, in order.

    Raises RuntimeError when a stream does not bring exactly the tokens that were asked for.
    """
    return asyncio.run(_serve(address, requests, concurrency))


async def _serve(address: str, requests: Sequence[Request], concurrency: int) -> list[Timeline]:
    room = asyncio.Semaphore(concurrency)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        return list(await asyncio.gather(*(_one(stub, request, room) for request in requests)))


async def _one(
    stub: "inference_pb2_grpc.InferenceServiceAsyncStub", request: Request, room: asyncio.Semaphore
) -> Timeline:
    message = generate_request(
        request.prompt, max_tokens=request.new_tokens, temperature=0.0, ignore_eos=True
    )
    async with room:
        timeline = Timeline(time.perf_counter(), [])
        received = 0
        async for response in stub.Generate(message, timeout=TIMEOUT):
            if response.token_ids:
                timeline.arrivals.append(time.perf_counter())
                received += len(response.token_ids)
    if received != request.new_tokens:
        raise RuntimeError(f"{received} tokens came, {request.new_tokens} were asked for")
    return timeline


def ask_in_turn(address: str, requests: Sequence[Request]) -> list[TimedAnswer]:
    """One request after the other, each to its end, over one connection.

    Raises RuntimeError when an answer does not bring exactly the tokens that were asked for.
    """
    return asyncio.run(_ask_in_turn(address, requests))


async def _ask_in_turn(address: str, requests: Sequence[Request]) -> list[TimedAnswer]:
    async with grpc.aio.insecure_channel(address) as channel:
        await channel.channel_ready()
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        return [await _answer(stub, request) for request in requests]


async def _answer(
    stub: "inference_pb2_grpc.InferenceServiceAsyncStub", request: Request
) -> TimedAnswer:
    message = generate_request(
        request.prompt, max_tokens=request.new_tokens, temperature=0.0, ignore_eos=True
    )
    token_ids: list[int] = []
    sent, seconds, cached = time.perf_counter(), 0.0, 0
    async for response in stub.Generate(message, timeout=TIMEOUT):
        if response.token_ids and not token_ids:
            seconds = time.perf_counter() - sent
        token_ids += response.token_ids
        cached = max(cached, response.usage.cached_tokens)
    if len(token_ids) != request.new_tokens:
        raise RuntimeError(f"{len(token_ids)} tokens came, {request.new_tokens} were asked for")
    return TimedAnswer(token_ids, seconds, cached)
