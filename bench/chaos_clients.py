"""Clients of `make chaos`: one request through its door, and everything that was heard of it."""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
import httpx

from triptych.v1 import inference_pb2, inference_pb2_grpc

sys.path.insert(0, str(Path(__file__).parent))
from chaos_ledger import CANCELLED, CONNECTION, STALLED, Behaviour, Heard
from chaos_reader import (
    Plan,
    Pulse,
    Reader,
    http_error,
    rpc_error,
    take_data,
    take_events,
    take_json,
    whole,
)
from chaos_requests import Ask, chat_request, generate_request, http_body, http_path

PATIENCE = 150.0
"""Seconds without an end after which a stream is lost: more than the engine's recovery_timeout."""
_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # a connection each
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 250),
]


@dataclass(frozen=True, slots=True)
class Addresses:
    """host:port of both doors."""

    grpc: str
    http: str


class Doors:
    """The engine's two doors, for one client: a context."""

    def __init__(self, where: Addresses, pulse: Pulse) -> None:
        self._where = where
        self._pulse = pulse
        self._closing = AsyncExitStack()

    async def __aenter__(self) -> Self:
        channel = grpc.aio.insecure_channel(self._where.grpc, options=_OPTIONS)
        self._stub = inference_pb2_grpc.InferenceServiceStub(
            await self._closing.enter_async_context(channel)
        )
        # Connections that are kept would be closed by the server just as they are used again.
        limits = httpx.Limits(max_keepalive_connections=0)
        client = httpx.AsyncClient(
            base_url=f"http://{self._where.http}", timeout=None, limits=limits, trust_env=False
        )
        self._http = await self._closing.enter_async_context(client)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._closing.aclose()

    async def ask(self, asks: Sequence[tuple[Ask, Plan]]) -> list[Heard]:
        """What was heard of each: several only through a session's door."""
        now = time.perf_counter()
        readers = [Reader(ask, plan, Heard(sent=now), self._pulse) for ask, plan in asks]
        self._pulse.open.update(readers)
        try:
            async with asyncio.timeout(PATIENCE):
                if asks[0][0].door == "session":
                    await self._session([ask for ask, _ in asks], readers)
                elif asks[0][0].door == "grpc":
                    await self._rpc(asks[0][0], readers[0])
                else:
                    await self._post(asks[0][0], readers[0])
        except TimeoutError:
            for reader in readers:
                reader.end(STALLED)
        finally:
            self._pulse.open.difference_update(readers)
        for reader in readers:
            reader.end(CONNECTION, "the stream ended without an end")
        return [reader.heard for reader in readers]

    # ---------------------------------------------------------------------------------------- gRPC

    async def _rpc(self, ask: Ask, reader: Reader) -> None:
        plan = reader.plan
        timeout = plan.seconds if plan.behaviour is Behaviour.DEADLINE else None
        call = (
            self._stub.Chat(chat_request(ask), timeout=timeout)
            if ask.chat
            else self._stub.Generate(generate_request(ask), timeout=timeout)
        )
        try:
            async for piece in call:
                await reader.take(piece)
                if plan.leaves(reader.heard) and not whole(ask, reader.heard):
                    call.cancel()
                    reader.end(CANCELLED)
                    return
        except grpc.aio.AioRpcError as error:
            reader.end(*rpc_error(error))
        else:
            reader.end()

    async def _session(self, asks: Sequence[Ask], readers: Sequence[Reader]) -> None:
        call = self._stub.Session()
        try:
            for number, ask in enumerate(asks):
                start = inference_pb2.SessionStart(id=number)
                if ask.chat:
                    start.chat.CopyFrom(chat_request(ask))
                else:
                    start.generate.CopyFrom(generate_request(ask))
                await call.write(inference_pb2.SessionRequest(start=start))
            left: set[int] = set()
            while not all(reader.heard.ended for reader in readers):
                if not await take_events(await call.read(), asks, readers):
                    break
                for number, reader in enumerate(readers):
                    if number in left or reader.heard.ended or not reader.plan.leaves(reader.heard):
                        continue
                    left.add(number)
                    cancel = inference_pb2.SessionCancel(id=number)
                    await call.write(inference_pb2.SessionRequest(cancel=cancel))
            await call.done_writing()
            while await take_events(await call.read(), asks, readers):
                pass  # nothing should come: what does doubles an end
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            ended = error if isinstance(error, grpc.aio.AioRpcError) else await _status_of(call)
            for reader in readers:
                reader.end(*rpc_error(ended))

    # ---------------------------------------------------------------------------------------- HTTP

    async def _post(self, ask: Ask, reader: Reader) -> None:
        body, plan = http_body(ask), reader.plan
        if plan.behaviour is Behaviour.DEADLINE:
            body["timeout_ms"] = max(1, int(plan.seconds * 1000))
        try:
            if plan.behaviour is Behaviour.CANCELS and not body["stream"]:
                async with asyncio.timeout(plan.seconds):
                    await self._answer(ask, body, reader)
            else:
                await self._answer(ask, body, reader)
        except httpx.TransportError as error:
            reader.end(CONNECTION, f"{type(error).__name__}: {error}")
        except TimeoutError:  # of the client that leaves
            reader.end(CANCELLED)

    async def _answer(self, ask: Ask, body: dict[str, object], reader: Reader) -> None:
        async with self._http.stream("POST", http_path(ask), json=body) as response:
            if response.status_code != 200 or not body["stream"]:
                answer = json.loads(await response.aread())
                if response.status_code != 200:
                    reader.end(*http_error(answer["error"]))
                    return
                take_json(answer, reader)
                reader.end()
                return
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    await take_data(line[6:], reader)
                if reader.plan.leaves(reader.heard) and not whole(ask, reader.heard):
                    reader.end(CANCELLED)
                    return


async def _status_of(call: grpc.aio.Call) -> grpc.aio.AioRpcError:
    """Why nothing more can be written to a call."""
    return grpc.aio.AioRpcError(
        await call.code(), await call.initial_metadata(), await call.trailing_metadata(),
        details=await call.details(),
    )  # fmt: skip
