"""The served workload against our engine: a client of the public gRPC port, in this process."""

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import grpc

from triptych.v1 import inference_pb2_grpc

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests" / "support")]
from workload import Request, Timeline

from engine import generate_request

TIMEOUT = 1800.0


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
