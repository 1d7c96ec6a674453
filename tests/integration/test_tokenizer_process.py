"""The tokenizer as a process of its own: how it starts, what it loads, how it ends."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

import fake_scheduler
from fake_scheduler import FakeScheduler
from scripted_models import write_m2_random_llama
from triptych.services.runtime.run_dir import RunDir
from triptych.v1 import common_pb2, control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc

FOREVER = [97] * 100_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_m2_random_llama(folder)
    return folder


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir.open(tmp_path / "run")


def command(model: Path, run_dir: RunDir, *flags: str) -> list[str]:
    return [
        sys.executable, "-m", "triptych.services.tokenizer", "--model", str(model),
        "--run-dir", str(run_dir.path), "--port", "0", "--http-port", "0", *flags,
    ]  # fmt: skip


@contextmanager
def started(model: Path, run_dir: RunDir, *flags: str) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        command(model, run_dir, *flags), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=30)


def stats(run_dir: RunDir) -> control_pb2.StatsResponse:
    with grpc.insecure_channel(f"unix:{run_dir.control_socket('tokenizer-0')}") as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        return stub.Stats(control_pb2.StatsRequest(), timeout=30, wait_for_ready=True)


def until_connected(process: "subprocess.Popen[str]", run_dir: RunDir) -> control_pb2.StatsResponse:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        if run_dir.control_socket("tokenizer-0").exists():
            reply = stats(run_dir)
            if reply.tokenizer.scheduler_connected:
                return reply
        time.sleep(0.05)
    raise AssertionError("it never connected")


def test_it_serves_without_torch_and_drains_on_sigterm(model: Path, run_dir: RunDir) -> None:
    scheduler = FakeScheduler(run_dir.scheduler_endpoint, lambda _: FOREVER, interval=0.01)
    with fake_scheduler.running(scheduler), started(model, run_dir) as process:
        reply = until_connected(process, run_dir)
        assert reply.process.pid == process.pid
        assert list(reply.tokenizer.model_names) == ["tiny"]
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert "torch" not in maps
        with grpc.insecure_channel(reply.tokenizer.address) as channel:
            request = inference_pb2.GenerateRequest(
                text="a", sampling_params=common_pb2.SamplingParams(max_tokens=100)
            )
            call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=30)
            first = next(call)
            process.send_signal(signal.SIGTERM)
            rest = list(call)
        assert len(first.token_ids) + sum(len(each.token_ids) for each in rest) == 100
        assert rest[-1].finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert process.wait(30) == 0
        _, log = process.communicate()
        assert "Traceback" not in log
        assert not run_dir.control_socket("tokenizer-0").exists()


def test_a_grace_of_zero_cuts_off(model: Path, run_dir: RunDir) -> None:
    scheduler = FakeScheduler(run_dir.scheduler_endpoint, lambda _: FOREVER, interval=0.01)
    flags = ("--shutdown-grace", "0")
    with fake_scheduler.running(scheduler), started(model, run_dir, *flags) as process:
        reply = until_connected(process, run_dir)
        with grpc.insecure_channel(reply.tokenizer.address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            call = stub.Generate(inference_pb2.GenerateRequest(text="a"), timeout=30)
            next(call)
            process.send_signal(signal.SIGINT)
            with pytest.raises(grpc.RpcError):
                list(call)
        assert process.wait(30) == 0


def assert_one_line(process: "subprocess.Popen[str]", *needles: str) -> None:
    _, log = process.communicate(timeout=60)
    assert process.returncode == 2, log
    assert "Traceback" not in log
    (line,) = [line for line in log.splitlines() if "error:" in line]
    for needle in needles:
        assert needle in line


def test_a_refusal_of_the_scheduler(model: Path, run_dir: RunDir) -> None:
    scheduler = FakeScheduler(run_dir.scheduler_endpoint, lambda _: [], refusal="model: another")
    with fake_scheduler.running(scheduler), started(model, run_dir) as process:
        assert_one_line(process, "model: another")


def test_a_port_in_use(model: Path, run_dir: RunDir) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = str(holder.getsockname()[1])
        with started(model, run_dir, "--port", port) as process:
            assert_one_line(process, port, "in use", "use another --port")


def test_an_address_that_is_not_of_this_machine(model: Path, run_dir: RunDir) -> None:
    with started(model, run_dir, "--host", "192.0.2.1", "--port", "50051") as process:
        assert_one_line(process, "192.0.2.1", "use another --host")


def test_a_name_in_use(model: Path, run_dir: RunDir) -> None:
    run_dir.lock("tokenizer-0")
    with started(model, run_dir) as process:
        assert_one_line(process, str(run_dir.path))


def test_a_missing_model(tmp_path: Path, run_dir: RunDir) -> None:
    with started(tmp_path / "nothing.gguf", run_dir) as process:
        assert_one_line(process, "nothing.gguf")
