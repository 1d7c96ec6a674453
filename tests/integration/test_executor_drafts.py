"""An executor process with a draft model, as its scheduler sees it."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
import zmq

from step_driver import DrivenSequence, StepDriver
from tiny_models import save, tiny_model
from triptych.services.executor.backend import BackendOptions, open_backend
from triptych.services.runtime.model_files import resolve_model
from triptych.services.runtime.run_dir import RunDir
from triptych.services.scheduler.executor_link import ExecutorJoined, ExecutorLink
from triptych.services.transport.channel import RouterChannel
from triptych.v1 import control_pb2, control_pb2_grpc, stage_pb2

UNKNOWN = -1
SECONDS = 60.0
WELCOME = stage_pb2.ExecutorWelcome(
    epoch=7, num_slots=2, max_num_batched_tokens=64, max_num_seqs=4, max_logits=4
)
Answer = stage_pb2.StepDone | stage_pb2.StepFailed


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served")
    save(tiny_model("llama", {}), path)
    return path


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("smaller")
    save(tiny_model("llama", {"num_hidden_layers": 1}), path)
    return path


@contextmanager
def executor(run_dir: Path, model: Path, *flags: str) -> Iterator["subprocess.Popen[str]"]:
    command = [
        sys.executable, "-m", "triptych.services.executor", f"--run-dir={run_dir}",
        f"--model={model}", "--kv-cache-memory=1MiB", "--cpu-threads=1", *flags,
    ]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


class SchedulerEnd:
    """The scheduler's end of the connection, a step at a time."""

    def __init__(self, run_dir: Path) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._link = ExecutorLink(
            self._context, RunDir.open(str(run_dir)), WELCOME, self._poller, timeout=SECONDS
        )

    def join(self) -> None:
        assert isinstance(self._next_event(), ExecutorJoined)

    def step(self, driver: StepDriver, rows: Sequence[tuple[DrivenSequence, list[int]]]) -> Answer:
        """Send a step and wait for its end."""
        driver.inputs(rows)
        slot = self._link.step_slot(1)
        slot[:] = driver.slot
        assert self._link.dispatch(1, 1)
        answer = self._next_event()
        assert isinstance(answer, Answer)
        return answer

    def logits(self, rows: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return self._link.logits(1, 1, rows).copy()

    def close(self) -> None:
        self._link.close()
        self._context.destroy(linger=0)

    def _next_event(self) -> object:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            ready = {int(each) for each, _ in self._poller.poll(100) if isinstance(each, int)}
            for event in self._link.receive(ready, time.monotonic()):
                return event
        raise AssertionError("nothing came")


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[SchedulerEnd]:
    end = SchedulerEnd(tmp_path / "run")
    yield end
    end.close()


def driver_of(model: Path) -> StepDriver:
    """A driver whose layout is that of the rings, over a model of the test's own process."""
    options = BackendOptions(plan="native", kv_cache_memory=1 << 20, threads=1)
    return StepDriver(open_backend(resolve_model(str(model)), options), max_tokens=64, max_rows=4)


def stats(run_dir: Path) -> control_pb2.ExecutorStats:
    with grpc.insecure_channel(f"unix:{run_dir / 'executor-0.control.sock'}") as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        return stub.Stats(control_pb2.StatsRequest(), timeout=10).executor


def test_a_step_with_unknown_tokens(
    scheduler: SchedulerEnd, served: Path, smaller: Path, tmp_path: Path
) -> None:
    """The guesses are the draft model's, the logits those of the served model behind them."""
    prompt, other = [5, 17, 3], [9, 9]
    rows = [(DrivenSequence(), [*prompt, UNKNOWN, UNKNOWN]), (DrivenSequence(), other)]
    with executor(tmp_path / "run", served, f"--speculative-model={smaller}"):
        scheduler.join()
        driver = driver_of(smaller)
        driver.free = list(range(40))  # the pool is smaller where two share the memory
        done = scheduler.step(driver, rows)
        assert isinstance(done, stage_pb2.StepDone), done
        guesses = np.frombuffer(done.draft_token_ids, "<u4").tolist()
        tokens = list(prompt)
        for guess in guesses:
            assert guess == int(driver.run(tokens).argmax())
            tokens.append(guess)
        logits = scheduler.logits(2)
        reference = driver_of(served)
        assert logits[0].tolist() == reference.run(tokens).tolist()
        assert logits[1].tolist() == reference.run(other).tolist()
        plain = scheduler.step(driver, [(rows[1][0], [1])])
        assert isinstance(plain, stage_pb2.StepDone)
        assert plain.draft_token_ids == b""
        counted = stats(tmp_path / "run")
        assert (counted.draft_model, counted.draft_plan) == (smaller.name, "native")
        assert counted.draft_tokens_total == len(guesses) == 2
        assert 0 < counted.draft_seconds_total < counted.step_seconds_total
        assert counted.draft_kv_cache_bytes * 2 == counted.kv_cache_bytes
        assert counted.draft_kv_cache_bytes + counted.kv_cache_bytes <= 1 << 20


def test_what_the_draft_model_cannot_compute_fails_the_step(
    scheduler: SchedulerEnd, served: Path, smaller: Path, tmp_path: Path
) -> None:
    with executor(tmp_path / "run", served, f"--speculative-model={smaller}"):
        scheduler.join()
        driver = driver_of(smaller)
        driver.free = list(range(40))
        sequence = DrivenSequence()
        failed = scheduler.step(driver, [(sequence, [1, UNKNOWN, 2])])
        assert isinstance(failed, stage_pb2.StepFailed)
        assert "unknown tokens are not behind known ones" in failed.message
        assert isinstance(scheduler.step(driver, [(sequence, [1, UNKNOWN])]), stage_pb2.StepDone)


def test_without_a_draft_model_unknown_tokens_fail_the_step(
    scheduler: SchedulerEnd, served: Path, tmp_path: Path
) -> None:
    with executor(tmp_path / "run", served):
        scheduler.join()
        failed = scheduler.step(driver_of(served), [(DrivenSequence(), [1, UNKNOWN])])
        assert isinstance(failed, stage_pb2.StepFailed)
        assert "token id -1" in failed.message
        assert stats(tmp_path / "run").draft_model == ""


@pytest.mark.parametrize("drafts", [False, True])
def test_hello_says_whether_there_is_one(
    served: Path, smaller: Path, tmp_path: Path, drafts: bool
) -> None:
    run_dir = RunDir.open(str(tmp_path / "run"))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    channel: RouterChannel[stage_pb2.ExecutorMessage, stage_pb2.ExecutorReply] = RouterChannel(
        context, run_dir.executor_endpoint, stage_pb2.ExecutorMessage
    )
    flags = [f"--speculative-model={smaller}"] if drafts else []
    try:
        with executor(run_dir.path, served, *flags):
            assert channel.socket.poll(int(SECONDS * 1000))
            (received,) = channel.receive()
        assert received.message is not None
        assert received.message.hello.has_draft_model is drafts
    finally:
        channel.close()
        context.destroy(linger=0)


def test_what_does_not_fit_ends_the_start_in_one_line(
    served: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    other = tmp_path_factory.mktemp("other")
    save(tiny_model("llama", {"vocab_size": 64}), other)
    for flag, said in (
        (str(other), "has a vocabulary of 64 tokens"),
        (str(tmp_path / "nowhere"), "no such file or folder"),
    ):
        command = [
            sys.executable, "-m", "triptych.services.executor", f"--run-dir={tmp_path / 'run'}",
            f"--model={served}", f"--speculative-model={flag}", "--kv-cache-memory=1MiB",
        ]  # fmt: skip
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        assert ended.returncode == 2
        assert said in ended.stderr.splitlines()[-1]
        assert "Traceback" not in ended.stderr
