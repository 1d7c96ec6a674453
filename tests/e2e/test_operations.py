"""What an operator can do with a running engine: restart, unload and load, drain, stop."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from engine import (
    CONTROL_NAMES,
    Answer,
    Engine,
    alive,
    generate_request,
    is_serving,
    running_engine,
)
from grpc_errors import GrpcError, as_error
from grpc_errors import refused as failing
from leaving import until
from small_engines import SMALL, tiny_model
from triptych.services.cli.engine import PROCESSES
from triptych.v1 import control_pb2

pytestmark = pytest.mark.e2e

_PROMPT = [3, 1, 4, 1, 5]
_TOKENS = 1500
_LONG: dict[str, Any] = {
    "max_tokens": _TOKENS,
    "ignore_eos": True,
    "temperature": 0.9,
    "seed": 11,
}
_CONTEXT = {"max_position_embeddings": 2048}
_READY = control_pb2.StageState.STATE_READY
_STOPPED = control_pb2.StageState.STATE_STOPPED


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("operations"), **_CONTEXT)


@pytest.fixture(scope="module")
def other(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers otherwise."""
    return tiny_model(tmp_path_factory.mktemp("other"), seed=99, **_CONTEXT)


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    run_dir = tmp_path_factory.mktemp("run") / "run"
    with running_engine(model, run_dir, *SMALL, "--shutdown-grace", "20") as engine:
        yield engine


class Streams:
    """Requests that run while something else is done."""

    def __init__(self, engine: Engine, count: int) -> None:
        self.answers: list[Answer | Exception | None] = [None] * count
        self._begun = threading.Semaphore(0)
        self._threads = [
            threading.Thread(target=self._read, args=(engine, index)) for index in range(count)
        ]
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            assert self._begun.acquire(timeout=30)

    def _read(self, engine: Engine, index: int) -> None:
        answer = Answer()
        request = generate_request([*_PROMPT, index], **_LONG)
        try:
            for response in engine.stub.Generate(request, timeout=60):
                if not answer.token_ids:
                    self._begun.release()
                answer.add(response)
            self.answers[index] = answer
        except grpc.RpcError as error:
            self.answers[index] = error

    def token_ids(self) -> list[list[int]]:
        """What came, once all have ended; raises what one of them raised."""
        found: list[list[int]] = []
        for thread in self._threads:
            thread.join(60)
        for answer in self.answers:
            if isinstance(answer, Exception):
                raise answer
            assert answer is not None
            found.append(answer.token_ids)
        return found


def undisturbed(engine: Engine, count: int) -> list[list[int]]:
    return [engine.generate([*_PROMPT, index], **_LONG).token_ids for index in range(count)]


def test_restart_of_the_executor_under_load_changes_no_token(engine: Engine) -> None:
    expected = undisturbed(engine, 4)
    before, restarts = engine.pid("executor-0"), engine.stage("executor-0").restarts_total
    streams = Streams(engine, 4)
    done = engine.restart_executor()
    assert done.pid == engine.pid("executor-0") != before
    assert done.seconds > 0
    assert streams.token_ids() == expected
    stage = engine.stage("executor-0")
    assert (stage.state, stage.restarts_total, stage.reason) == (_READY, restarts + 1, "")
    engine.wait_idle()


def test_a_second_operation_at_the_same_time_is_refused(engine: Engine) -> None:
    first = threading.Thread(target=engine.restart_executor)
    first.start()
    until(lambda: engine.stage("executor-0").state != _READY)  # or the second might be the first
    refused = failing(engine.resume)
    first.join(60)
    assert refused.code() == grpc.StatusCode.ABORTED
    assert refused.details() == "RestartExecutor is under way; try again after it"


def test_unload_gives_the_memory_back_and_load_takes_up_again(engine: Engine) -> None:
    expected = undisturbed(engine, 1)
    executor = engine.pid("executor-0")
    assert engine.unload_model() > 10 << 20
    assert not alive(executor)
    stage = engine.stage("executor-0")
    assert (stage.state, stage.pid) == (_STOPPED, 0)
    assert not is_serving(engine.address)
    error = failing(lambda: engine.generate(_PROMPT))
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert "the model is unloaded (LoadModel loads it)" in error.details()
    assert engine.unload_model() == 0  # safe to repeat
    error = failing(engine.restart_executor)
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert engine.load_model() == ["model"]
    assert undisturbed(engine, 1) == expected
    assert is_serving(engine.address)


def test_unload_lets_open_requests_end(engine: Engine) -> None:
    expected = undisturbed(engine, 2)
    streams = Streams(engine, 2)
    engine.unload_model()
    assert streams.token_ids() == expected
    engine.load_model()


def test_another_model_takes_the_place_under_the_same_address(
    engine: Engine, model: Path, other: Path
) -> None:
    address, http = engine.address, engine.http_address
    expected = undisturbed(engine, 2)
    streams = Streams(engine, 2)
    assert engine.load_model(other, "second", "zweites") == ["second", "zweites"]
    assert streams.token_ids() == expected  # by the model that they began with
    assert (engine.address, engine.http_address) == (address, http)
    assert undisturbed(engine, 2) != expected
    assert list(engine.stats("tokenizer-0").tokenizer.model_names) == ["second", "zweites"]
    assert engine.load_model(model) == ["model"]
    assert undisturbed(engine, 2) == expected


def test_what_is_no_model_is_refused_at_once(engine: Engine, tmp_path: Path) -> None:
    pids = [engine.pid(name) for name in CONTROL_NAMES]
    error = failing(lambda: engine.load_model(tmp_path / "gone.gguf"))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "no such file or folder" in error.details()
    assert [engine.pid(name) for name in CONTROL_NAMES] == pids


def test_a_model_that_cannot_be_loaded_leaves_the_one_before(
    engine: Engine, model: Path, tmp_path: Path
) -> None:
    expected = undisturbed(engine, 1)
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4096])
    error = failing(lambda: engine.load_model(broken))
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    said = error.details()
    assert said.startswith("executor-0 exited with code 2: ")
    assert said.endswith("; the model of before is served again")
    assert str(weights) in said
    assert undisturbed(engine, 1) == expected


def test_drain_and_resume_go_through_to_the_tokenizer(engine: Engine) -> None:
    for _ in range(10):  # a busy machine may drain it when the stream has ended
        streams = Streams(engine, 1)
        with engine.frozen():
            still_open = engine.drain(grace_ms=1)
        if still_open:
            break
        engine.resume()
    assert still_open == 1
    assert failing(lambda: engine.generate(_PROMPT)).code() == grpc.StatusCode.UNAVAILABLE
    assert not is_serving(f"unix:{engine.run_dir}/supervisor.control.sock", "")
    assert len(streams.token_ids()[0]) == _TOKENS
    assert engine.drain() == 0
    engine.resume()
    assert engine.generate(_PROMPT, max_tokens=1).completion_tokens == 1


def triptych(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "triptych.services.cli", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )


def control(engine: Engine, *words: str) -> "subprocess.CompletedProcess[str]":
    return triptych("control", *words, "--run-dir", str(engine.run_dir))


def test_the_command_line_does_the_same(engine: Engine, tmp_path: Path) -> None:
    status = control(engine, "status")
    assert (status.returncode, status.stderr) == (0, "")
    assert [line.split(",")[0].split() for line in status.stdout.splitlines()] == [
        [name, "ready"] for name in PROCESSES
    ]
    assert control(engine, "restart-executor").stdout.startswith("the executor is process ")
    assert control(engine, "drain").stdout == "drained, no request is open\n"
    assert control(engine, "resume").stdout == "requests are taken again\n"
    assert control(engine, "unload-model").stdout.endswith(" are free again\n")
    status = control(engine, "status")
    assert status.returncode == 1
    assert "executor-0   stopped: the model is unloaded (LoadModel loads it)" in status.stdout
    refused = control(engine, "load-model", str(tmp_path / "gone"))
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith("triptych control load-model: error: INVALID_ARGUMENT: ")
    assert refused.stderr.count("\n") == 1
    assert control(engine, "load-model").stdout.startswith("model is served, after ")
    done = triptych("health", "--run-dir", str(engine.run_dir))
    assert (done.returncode, "supervisor " in done.stdout) == (0, True), done.stdout


def until_gone(pids: Sequence[int]) -> None:
    until(lambda: not any(alive(pid) for pid in pids))


def test_no_engine_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    done = triptych("control", "status", "--run-dir", str(folder))
    assert done.returncode == 2
    assert done.stderr.startswith(f"triptych control: error: no engine runs in {folder}; ")


def test_a_stop_while_the_executor_is_away_lets_streams_end(model: Path, tmp_path: Path) -> None:
    flags = ("--shutdown-grace", "30")
    with running_engine(model, tmp_path / "run", *SMALL, *flags) as engine:
        expected = undisturbed(engine, 2)
        streams = Streams(engine, 2)
        os.kill(engine.pid("executor-0"), signal.SIGKILL)
        engine.process.send_signal(signal.SIGTERM)
        assert streams.token_ids() == expected
        assert engine.process.wait(30) == 0
    assert sorted(path.name for path in engine.run_dir.iterdir() if path.is_socket()) == []
    assert not (engine.run_dir / "stages.pb").exists()


def test_a_stop_in_the_middle_of_a_load(model: Path, other: Path, tmp_path: Path) -> None:
    with running_engine(model, tmp_path / "run", *SMALL) as engine:
        tokenizer = engine.pid("tokenizer-0")
        said: list[GrpcError] = []

        def load() -> None:
            try:
                engine.load_model(other)
            except grpc.RpcError as error:
                said.append(as_error(error))

        loading = threading.Thread(target=load)
        loading.start()
        until_gone([tokenizer])
        engine.process.send_signal(signal.SIGTERM)
        loading.join(30)
        assert engine.process.wait(30) == 0
        assert [error.code() for error in said] == [grpc.StatusCode.UNAVAILABLE]


def test_a_drain_outlives_the_tokenizer_that_was_told(model: Path, tmp_path: Path) -> None:
    with running_engine(model, tmp_path / "run", *SMALL) as engine:
        engine.drain()
        os.kill(engine.pid("tokenizer-0"), signal.SIGKILL)
        deadline = time.monotonic() + 30
        while not (engine.stage("tokenizer-0").restarts_total and draining(engine)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert failing(lambda: engine.generate(_PROMPT)).code() == grpc.StatusCode.UNAVAILABLE
        engine.resume()
        assert engine.generate(_PROMPT, max_tokens=1).completion_tokens == 1


def test_a_drain_outlives_another_model(engine: Engine) -> None:
    engine.drain()
    engine.unload_model()
    engine.load_model()
    engine.load_model()
    assert failing(lambda: engine.generate(_PROMPT)).code() == grpc.StatusCode.UNAVAILABLE
    engine.resume()
    assert engine.generate(_PROMPT, max_tokens=1).completion_tokens == 1


@pytest.mark.parametrize(
    "names",
    [["n" * 200_000], ["a\0b"], ["ok", ""], ["-x"], ["x"] * 65],
    ids=["long", "zero byte", "empty", "dash", "many"],
)
def test_names_that_no_command_line_takes_are_refused(engine: Engine, names: list[str]) -> None:
    pids = [engine.pid(name) for name in CONTROL_NAMES]
    error = failing(lambda: engine.load_model("", *names))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert error.details().startswith("served_model_names: ")
    assert [engine.pid(name) for name in CONTROL_NAMES] == pids


def draining(engine: Engine) -> bool:
    try:
        return engine.stats("tokenizer-0").tokenizer.draining
    except grpc.RpcError:
        return False


def test_a_second_signal_ends_at_once_and_leaves_nobody(model: Path, tmp_path: Path) -> None:
    flags = (*SMALL, "--shutdown-grace", "600")
    with pytest.raises(AssertionError, match="ended with 143"):  # noqa: SIM117, PT012 - one engine
        with running_engine(model, tmp_path / "run", *flags) as engine:
            pids = [engine.pid(name) for name in CONTROL_NAMES]
            os.kill(engine.pid("executor-0"), signal.SIGSTOP)  # no stream can end
            stream = engine.stub.Generate(generate_request(_PROMPT, max_tokens=5), timeout=60)
            until(lambda: engine.stats("scheduler").scheduler.requests_tracked)
            engine.process.send_signal(signal.SIGTERM)
            until(lambda: not is_serving(engine.address))
            assert engine.process.poll() is None
            engine.process.send_signal(signal.SIGTERM)
            engine.process.wait(30)
            stream.cancel()
            until_gone(pids)


def test_a_killed_engine_is_cleaned_up_by_the_next_one(model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with pytest.raises(AssertionError, match="ended with -9"):  # noqa: SIM117, PT012 - one engine
        with running_engine(model, run_dir, *SMALL) as engine:
            pids = [engine.pid(name) for name in CONTROL_NAMES]
            engine.process.kill()
            engine.process.wait(30)
            until_gone(pids)
    left = {path.name for path in run_dir.iterdir() if path.is_socket()}
    assert "supervisor.control.sock" in left
    assert len(left) == 8
    with running_engine(model, run_dir, *SMALL) as engine:
        log = engine.log.read_text()
        assert log.count("which a killed process left") == 7  # its own socket it has replaced
        assert engine.generate(_PROMPT, max_tokens=1).completion_tokens == 1
