"""The shape of the running engine: who loads what, who listens where, what is left afterwards."""

import os
import signal
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from engine import CONTROL_NAMES, Engine, alive, running_engine
from leaving import until
from small_engines import SMALL, tiny_model

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("processes")
    with running_engine(tiny_model(folder), folder / "run", *SMALL) as engine:
        yield engine


def maps(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def test_three_processes_and_none_has_torch(engine: Engine) -> None:
    pids = {name: engine.pid(name) for name in CONTROL_NAMES}
    assert len(set(pids.values())) == 3
    for pid in pids.values():  # the native plan does without
        assert "libtorch" not in maps(pid)


def test_what_a_process_has_not_loaded_when_it_serves(engine: Engine) -> None:
    """By the first token: forked children share what their parent had loaded, and no more."""
    engine.generate([1, 2, 3], max_tokens=1)
    health = urllib.request.urlopen(f"http://{engine.http_address}/health", timeout=20)
    assert health.status == 200  # what HTTP needs is loaded too
    foreign = {
        "tokenizer-0": ("numpy", "_cpu.", "_yaml", "/llguidance/"),
        "scheduler": ("tokenizers.", "uvloop", "_yaml", "/llguidance/"),
        "executor-0": ("tokenizers.", "uvloop", "_yaml", "/llguidance/"),
    }
    for name, libraries in foreign.items():
        loaded = maps(engine.pid(name))
        assert [each for each in libraries if each in loaded] == []


def test_processes_go_by_their_names_and_hold_nothing_of_the_supervisor(engine: Engine) -> None:
    for name in CONTROL_NAMES:
        process = Path(f"/proc/{engine.pid(name)}")
        assert (process / "comm").read_text() == f"{name}\n"
        held = [str(fd.readlink()) for fd in (process / "fd").iterdir()]
        assert [each for each in held if each.endswith(".lock")] == [
            str(engine.run_dir / f"{name}.lock")
        ]
        assert "pidfd" not in "".join(held)
        assert (process / "fd" / "0").readlink() == Path(os.devnull)


def test_only_the_tokenizer_listens_on_tcp(engine: Engine) -> None:
    ports = [int(each.rsplit(":", 1)[1]) for each in (engine.address, engine.http_address)]
    listening = {
        name: [
            c.laddr.port
            for c in psutil.Process(engine.pid(name)).net_connections(kind="inet")
            if c.status == psutil.CONN_LISTEN
        ]
        for name in CONTROL_NAMES
    }
    assert sorted(listening.pop("tokenizer-0")) == sorted(ports)
    assert listening == {"scheduler": [], "executor-0": []}


@pytest.mark.parametrize("name", [*CONTROL_NAMES, "public"])
def test_every_server_has_health_and_both_reflections(engine: Engine, name: str) -> None:
    target, service = f"unix:{engine.run_dir / name}.control.sock", "triptych.v1.ControlService"
    if name == "public":
        target, service = engine.address, "triptych.v1.InferenceService"
    with grpc.insecure_channel(target) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for asked in ("", service):
            request = health_pb2.HealthCheckRequest(service=asked)
            watch = health.Watch(request, timeout=30)
            # A process may say so a moment after the public port that the fixture waited for.
            while next(watch).status != health_pb2.HealthCheckResponse.SERVING:
                pass
            watch.cancel()
            said = health.Check(request, timeout=30).status
            assert said == health_pb2.HealthCheckResponse.SERVING
        for package in ("grpc.reflection.v1", "grpc.reflection.v1alpha"):
            assert {service, "grpc.health.v1.Health"} <= reflected(channel, package)


def reflected(channel: grpc.Channel, package: str) -> set[str]:
    """The services that a server lists by that version of reflection."""
    method = channel.stream_stream(
        f"/{package}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    replies = method(iter([asked]), timeout=30)
    return {each.name for reply in replies for each in reply.list_services_response.service}


def test_rings_are_memfds_mapped_by_scheduler_and_executor_only(engine: Engine) -> None:
    for name in ("scheduler", "executor-0"):
        assert "memfd:triptych-step" in maps(engine.pid(name))
        assert "memfd:triptych-logits" in maps(engine.pid(name))
        assert engine.stats(name).process.ring_maps >= 2
    assert "memfd:triptych" not in maps(engine.pid("tokenizer-0"))


def test_the_run_directory_is_private(engine: Engine) -> None:
    assert engine.run_dir.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["scheduler.zmq", "executor.zmq", "executor.fds", "samplers.sock"])
def test_noise_on_an_internal_socket_harms_nobody(engine: Engine, name: str) -> None:
    noise = np.random.default_rng(0).bytes(4096)
    path = str(engine.run_dir / name)
    kind = socket.SOCK_STREAM if name.endswith(".zmq") else socket.SOCK_SEQPACKET
    for payload in (
        noise,
        b"\xff" * 9,
        b"\xff\x00\x00\x00\x00\x40\x00\x00\x00\x7f",
        b"\x80\x04\x95.",
    ):
        with socket.socket(socket.AF_UNIX, kind) as peer:
            peer.settimeout(2)
            try:
                peer.connect(path)
                peer.sendall(payload)
                peer.recv(64)
            except OSError:
                pass  # being cut off is a right answer
    assert engine.generate([1, 2, 3], max_tokens=3, temperature=0.0).completion_tokens == 3
    engine.wait_idle()


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_everything_cleanly(tmp_path: Path, sig: signal.Signals) -> None:
    with running_engine(tiny_model(tmp_path), tmp_path / "run", *SMALL) as engine:
        pids = [engine.pid(name) for name in CONTROL_NAMES]
        engine.process.send_signal(sig)
        assert engine.process.wait(30) == 0
        assert not any(alive(pid) for pid in pids)
        assert "Traceback" not in engine.log.read_text()


def test_no_orphans_after_the_supervisor_is_killed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="ended with -9"):  # noqa: SIM117, PT012 - one engine
        with running_engine(tiny_model(tmp_path), tmp_path / "run", *SMALL) as engine:
            pids = [engine.pid(name) for name in CONTROL_NAMES]
            os.kill(engine.process.pid, signal.SIGKILL)
            engine.process.wait(30)
            until(lambda: not any(alive(pid) for pid in pids))
