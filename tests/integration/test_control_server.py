"""The control endpoint over its real socket."""

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from triptych.services.runtime import control_server
from triptych.services.runtime.control_server import CONTROL_SERVICE, ControlServer
from triptych.services.runtime.process_stats import count_ring_maps, process_stats
from triptych.services.runtime.run_dir import RunDir
from triptych.v1 import control_pb2, control_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
V1_METHOD = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"


def stats() -> control_pb2.StatsResponse:
    return control_pb2.StatsResponse(
        process=process_stats(), scheduler=control_pb2.SchedulerStats(blocks_total=7)
    )


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[tuple[ControlServer, grpc.aio.Channel]]:
    server = ControlServer(RunDir.open(folder), "scheduler", stats)
    await server.start()
    async with grpc.aio.insecure_channel(server.target) as channel:
        yield server, channel
    await server.stop()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    return path


def test_stats(folder: Path) -> None:
    async def scenario() -> None:
        async with running(folder) as (_, channel):
            stub = control_pb2_grpc.ControlServiceStub(channel)
            reply = await stub.Stats(control_pb2.StatsRequest())
            assert reply.scheduler.blocks_total == 7
            assert reply.process.pid == os.getpid()
            assert reply.process.resident_bytes > 1 << 20
            assert reply.process.open_files > 0
            assert reply.process.uptime_seconds > 0

    asyncio.run(scenario())


def test_socket_is_private_replaced_and_removed(folder: Path) -> None:
    path = folder / "scheduler.control.sock"
    path.touch()

    async def scenario() -> None:
        async with running(folder):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert stat.S_ISSOCK(path.stat().st_mode)

    asyncio.run(scenario())
    assert not path.exists()


def test_health_check_and_list(folder: Path) -> None:
    async def scenario() -> None:
        async with running(folder) as (server, channel):
            health = health_pb2_grpc.HealthStub(channel)
            for service in ("", CONTROL_SERVICE):
                request = health_pb2.HealthCheckRequest(service=service)
                assert (await health.Check(request)).status == NOT_SERVING
                server.set_serving(True)
                assert (await health.Check(request)).status == SERVING
                server.set_serving(False)
            listed = await health.List(health_pb2.HealthListRequest())
            assert set(listed.statuses) == {"", CONTROL_SERVICE}
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await health.Check(health_pb2.HealthCheckRequest(service="nobody"))
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND

    asyncio.run(scenario())


def test_watchers_hear_changes_and_do_not_hold_up_the_stop(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_server, "_STOP_GRACE", 3600.0)

    async def scenario() -> None:
        async with running(folder) as (server, channel):
            health = health_pb2_grpc.HealthStub(channel)
            watch = health.Watch(health_pb2.HealthCheckRequest(service=""))
            assert (await watch.read()).status == NOT_SERVING
            server.set_serving(True)
            assert (await watch.read()).status == SERVING
            stranger = health.Watch(health_pb2.HealthCheckRequest(service="nobody"))
            assert (await stranger.read()).status == SERVICE_UNKNOWN
            await asyncio.wait_for(server.stop(), timeout=30)
            assert (await watch.read()).status == NOT_SERVING
            assert await watch.read() is grpc.aio.EOF

    asyncio.run(scenario())


def test_reflection_v1_and_v1alpha(folder: Path) -> None:
    async def scenario() -> None:
        async with running(folder) as (_, channel):
            v1 = channel.stream_stream(
                V1_METHOD,
                request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )
            alpha = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
            for method in (v1, alpha):
                names = await listed(method)
                assert {CONTROL_SERVICE, "grpc.health.v1.Health"} <= names
                for name in names:
                    request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=name)
                    async for reply in method(iter([request])):
                        assert reply.file_descriptor_response.file_descriptor_proto, name

    asyncio.run(scenario())


async def listed(
    method: "grpc.aio.StreamStreamMultiCallable[Any, Any]",
) -> set[str]:
    call = method(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    return {
        service.name async for reply in call for service in reply.list_services_response.service
    }


def test_an_error_in_stats_leaks_nothing(folder: Path) -> None:
    def broken() -> control_pb2.StatsResponse:
        raise ValueError("a secret")

    async def scenario() -> None:
        server = ControlServer(RunDir.open(folder), "scheduler", broken)
        await server.start()
        async with grpc.aio.insecure_channel(server.target) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await control_pb2_grpc.ControlServiceStub(channel).Stats(control_pb2.StatsRequest())
        await server.stop()
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in (caught.value.details() or "")

    asyncio.run(scenario())


def test_ring_maps_counts_rings_only(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 rw-s 0 00:01 1 /memfd:triptych-step (deleted)\n"
        "7f02-7f03 rw-s 0 00:01 2 /memfd:triptych-logits (deleted)\n"
        "7f04-7f05 rw-s 0 00:01 3 /memfd:something (deleted)\n"
    )
    assert count_ring_maps(maps) == 2
