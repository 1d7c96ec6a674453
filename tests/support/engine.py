"""A whole engine for tests: the real processes, started by `triptych serve`, reached over gRPC."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from triptych.v1 import (
    common_pb2,
    control_pb2,
    control_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
)

START_TIMEOUT = 90.0
CONTROL_NAMES = ("tokenizer-0", "scheduler", "executor-0")
RECONNECT_SOON = (
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
)
"""Of a channel that finds a process again when it has been started again."""


@dataclass
class Answer:
    """A whole stream, joined."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish_reason: int = 0
    finish_count: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    stop_string: str | None = None
    stop_token_id: int | None = None

    def add(self, response: inference_pb2.GenerateResponse | inference_pb2.ChatResponse) -> None:
        self.text += response.text
        self.token_ids += response.token_ids
        self.pieces.append(response.text)
        if response.finish_reason:
            self.finish_reason = response.finish_reason
            self.finish_count += 1
            self.prompt_tokens = response.usage.prompt_tokens
            self.completion_tokens = response.usage.completion_tokens
            if response.HasField("stop_string"):
                self.stop_string = response.stop_string
            if response.HasField("stop_token_id"):
                self.stop_token_id = response.stop_token_id


class Engine:
    """Handles to a running engine. Channels are made lazily and closed at the end."""

    def __init__(self, run_dir: Path, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.run_dir = run_dir
        self.process = process
        self.log = log
        self._controls: dict[str, control_pb2_grpc.ControlServiceStub] = {}
        self._channels: list[grpc.Channel] = []
        self._stub: inference_pb2_grpc.InferenceServiceStub | None = None

    def control(self, name: str) -> control_pb2_grpc.ControlServiceStub:
        if name not in self._controls:
            socket = self.run_dir / f"{name}.control.sock"
            channel = grpc.insecure_channel(f"unix:{socket}", options=RECONNECT_SOON)
            self._channels.append(channel)
            self._controls[name] = control_pb2_grpc.ControlServiceStub(channel)
        return self._controls[name]

    def stats(self, name: str) -> control_pb2.StatsResponse:
        return self.control(name).Stats(control_pb2.StatsRequest(), timeout=10)

    def flush_cache(self) -> int:
        request = control_pb2.FlushCacheRequest()
        return self.control("scheduler").FlushCache(request, timeout=10).blocks_forgotten

    @property
    def operator(self) -> control_pb2_grpc.ControlServiceStub:
        """The supervisor's control calls."""
        return self.control("supervisor")

    def stage(self, name: str) -> control_pb2.StageState:
        """What the supervisor says of a process."""
        stages = self.stats("supervisor").supervisor.stages
        return next(stage for stage in stages if stage.name == name)

    def restart_executor(self, timeout: float = 60) -> control_pb2.RestartExecutorResponse:
        request = control_pb2.RestartExecutorRequest()
        return self.operator.RestartExecutor(request, timeout=timeout)

    def unload_model(self, grace_ms: int = 0, timeout: float = 60) -> int:
        """Bytes that were given back."""
        request = control_pb2.UnloadModelRequest(grace_ms=grace_ms)
        return self.operator.UnloadModel(request, timeout=timeout).bytes_freed

    def load_model(
        self, model: Path | str = "", *names: str, grace_ms: int = 0, timeout: float = 90
    ) -> list[str]:
        """The names that are served then."""
        request = control_pb2.LoadModelRequest(
            model=str(model), served_model_names=names, grace_ms=grace_ms
        )
        return list(self.operator.LoadModel(request, timeout=timeout).model_names)

    def drain(self, grace_ms: int = 0, timeout: float = 60) -> int:
        """Requests that are still open."""
        request = control_pb2.DrainRequest(grace_ms=grace_ms)
        return self.operator.Drain(request, timeout=timeout).requests_running

    def resume(self) -> None:
        self.operator.Resume(control_pb2.ResumeRequest(), timeout=10)

    @property
    def names(self) -> list[str]:
        """Of the supervised processes."""
        return [stage.name for stage in self.stats("supervisor").supervisor.stages]

    @property
    def address(self) -> str:
        return self.stats("tokenizer-0").tokenizer.address

    @property
    def http_address(self) -> str:
        return self.stats("tokenizer-0").tokenizer.http_address

    @property
    def stub(self) -> inference_pb2_grpc.InferenceServiceStub:
        if self._stub is None:
            channel = grpc.insecure_channel(self.address, options=RECONNECT_SOON)
            self._channels.append(channel)
            self._stub = inference_pb2_grpc.InferenceServiceStub(channel)
        return self._stub

    def pid(self, name: str) -> int:
        return self.stats(name).process.pid

    @contextmanager
    def frozen(self, name: str = "executor-0") -> Iterator[None]:
        """Within, that process does nothing: while the executor is frozen no request moves on.

        For less than `heartbeat_timeout` (10 s unless a flag says otherwise), or it is taken for
        dead.
        """
        pid = self.pid(name)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with suppress(ProcessLookupError):  # it may have been killed meanwhile
                os.kill(pid, signal.SIGCONT)

    def kill_midway(self, name: str, count: int = 1) -> bool:
        """SIGKILL to a process while the scheduler has so many choices that have not ended.

        The executor is frozen for it, so that none of them ends before. False where so many are
        not there any more: it came too late, as it may on a busy machine, and nobody is killed.
        """
        pid = self.pid(name)
        with self.frozen():
            time.sleep(0.05)  # the last of what it has said arrives
            if self.stats("scheduler").scheduler.requests_tracked < count:
                return False
            os.kill(pid, signal.SIGKILL)
        return True

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        timeout: float = 60,
        add_special_tokens: bool | None = None,
        **params: Any,
    ) -> Answer:
        """Run one Generate to its end. Keyword arguments are SamplingParams fields."""
        answer = Answer()
        request = generate_request(prompt, add_special_tokens=add_special_tokens, **params)
        for response in self.stub.Generate(request, timeout=timeout):
            answer.add(response)
        return answer

    def wait_idle(self, timeout: float = 30.0) -> control_pb2.SchedulerStats:
        """Wait until nothing runs, then assert that everything that was lent is back."""
        deadline = time.monotonic() + timeout
        while True:
            scheduler = self.stats("scheduler").scheduler
            tokenizer = self.stats("tokenizer-0").tokenizer
            idle = (
                scheduler.requests_tracked == 0
                and scheduler.requests_running == 0
                and scheduler.requests_waiting == 0
                and scheduler.blocks_free == scheduler.blocks_total
                and scheduler.slots_free == scheduler.slots_total
                and tokenizer.streams == 0
                and tokenizer.requests_running == 0
            )
            if idle:
                return scheduler
            if time.monotonic() > deadline:
                raise AssertionError(f"not idle after {timeout} s: {scheduler} {tokenizer}")
            time.sleep(0.02)


def generate_request(
    prompt: str | Sequence[int], *, add_special_tokens: bool | None = None, **params: Any
) -> inference_pb2.GenerateRequest:
    """A GenerateRequest; a string is a text prompt, anything else token ids."""
    request = inference_pb2.GenerateRequest(sampling_params=common_pb2.SamplingParams(**params))
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.CopyFrom(common_pb2.TokenIds(ids=prompt))
    if add_special_tokens is not None:
        request.add_special_tokens = add_special_tokens
    return request


@contextmanager
def running_engine(model: Path, run_dir: Path, *flags: str) -> Iterator[Engine]:
    """Start `triptych serve` on a free port, wait until it serves, stop it cleanly at the end."""
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    log = run_dir / "serve.log"
    command = [
        sys.executable, "-m", "triptych.services.cli", "serve", "--model", str(model),
        "--run-dir", str(run_dir), "--port", "0", "--http-port", "0", *flags,
    ]  # fmt: skip
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT)
    engine = Engine(run_dir, process, log)
    try:
        wait_until_serving(engine)
        yield engine
        code = stop(engine)
        assert code == 0, f"serve ended with {code}:\n{log.read_text()}"
    finally:
        engine.close()
        if process.poll() is None:
            process.kill()
            process.wait(10)


def stop(engine: Engine, sig: int = signal.SIGTERM) -> int:
    """Signal the supervisor and wait for its exit code."""
    engine.process.send_signal(sig)
    return engine.process.wait(60)


def wait_until_serving(engine: Engine) -> None:
    """Wait for the public health service to say SERVING. Raises with the log when serve ends."""
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        if engine.process.poll() is not None:
            raise RuntimeError(f"serve ended early:\n{engine.log.read_text()}")
        if (engine.run_dir / "tokenizer-0.control.sock").exists():
            try:
                if engine.stats("tokenizer-0").tokenizer.address and is_serving(engine.address):
                    return
            except grpc.RpcError:
                pass  # not up yet
        time.sleep(0.02)
    raise RuntimeError(f"not serving after {START_TIMEOUT} s:\n{engine.log.read_text()}")


def is_serving(address: str, service: str = "triptych.v1.InferenceService") -> bool:
    """Whether grpc.health.v1 answers SERVING at once."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=2
            )
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
