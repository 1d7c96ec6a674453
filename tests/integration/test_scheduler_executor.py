"""The step loop between real sockets and real rings: streams, aborts, deaths, nonsense.

The loop runs on a thread of the test, the executor in a process of its own, the tokenizers are
sockets of the test.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import zmq

from fake_executor import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    NAN_TOKEN,
    RAISE_TOKEN,
    VOCABULARY,
    ExecutorProcess,
    continuation,
)
from fake_tokenizer import FakeTokenizer
from triptych.engine_core.errors import InvalidRequest, NotFinite, TooLong, Unavailable
from triptych.engine_core.layout import LAYOUT_VERSION
from triptych.engine_core.step import FinishReason
from triptych.kernels.sample_columns import SampleTuple
from triptych.services.runtime.run_dir import RunDir
from triptych.services.scheduler import loop
from triptych.services.scheduler.loop import StepLoop
from triptych.services.scheduler.sampler import SampleRows, sampler_of
from triptych.services.scheduler.settings import SchedulerSettings
from triptych.services.transport.channel import PROTOCOL_VERSION, DealerChannel, new_identity
from triptych.services.transport.rings import LogitsView
from triptych.v1 import control_pb2, control_pb2_grpc, stage_pb2

LENGTH = FinishReason.LENGTH


class Engine:
    """A loop on a thread, and what a test starts beside it."""

    def __init__(self, folder: Path, sampler: SampleRows, **settings: object) -> None:
        self.run_dir = RunDir.open(folder)
        values: dict[str, object] = {"heartbeat_interval": 0.1, "heartbeat_timeout": 1.5}
        values |= {"max_num_seqs": 8, "max_num_batched_tokens": 16, "run_dir": str(folder)}
        values |= settings
        self.settings = SchedulerSettings.model_validate(values)
        self.loop = StepLoop(self.settings, self.run_dir, epoch=77, sampler=sampler)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._executors: list[ExecutorProcess] = []
        self._tokenizers: list[FakeTokenizer] = []

    def _run(self) -> None:
        try:
            self.loop.run()
        except BaseException as error:
            self.error = error

    def executor(self, **options: object) -> ExecutorProcess:
        executor = ExecutorProcess(self.run_dir.path, **options)
        self._executors.append(executor)
        return executor

    def tokenizer(self, **options: object) -> FakeTokenizer:
        """One that has been welcomed."""
        tokenizer = self.stranger(**options)
        tokenizer.until(lambda: tokenizer.welcomes)
        return tokenizer

    def stranger(self, **options: object) -> FakeTokenizer:
        tokenizer = FakeTokenizer(self.run_dir, **options)  # type: ignore[arg-type]  # test values
        self._tokenizers.append(tokenizer)
        return tokenizer

    @property
    def stats(self) -> control_pb2.SchedulerStats:
        return self.loop.snapshot.stats

    def until(self, condition: Callable[[], object], timeout: float = 20.0) -> None:
        end = time.monotonic() + timeout
        while not condition():
            assert self.error is None
            assert time.monotonic() < end, f"the condition does not come true:\n{self.stats}"
            time.sleep(0.01)

    def until_idle(self) -> None:
        """Everything is back where it started."""
        self.until(self._idle)

    def _idle(self) -> bool:
        stats = self.stats
        return (
            stats.blocks_free == stats.blocks_total
            and stats.slots_free == stats.slots_total
            and stats.requests_tracked == stats.requests_running == stats.requests_waiting == 0
        )

    def stop(self) -> None:
        """End the loop and the tokenizers; executors stay."""
        for tokenizer in self._tokenizers:
            tokenizer.close()
        self._tokenizers.clear()
        if self._thread.is_alive():
            self.loop.stop()
            self._thread.join(10)

    def close(self) -> None:
        self.stop()
        for executor in self._executors:
            executor.kill()
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error


MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine(tmp_path: Path) -> Iterator[MakeEngine]:
    engines: list[Engine] = []

    def make(sampler: SampleRows | None = None, **settings: object) -> Engine:
        folder = tmp_path / f"run{len(engines)}"
        plain = settings.get("engine_impl") == "python"
        engine = Engine(folder, sampler or sampler_of("python" if plain else "native"), **settings)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


# ------------------------------------------------------------------------------------------ streams


@pytest.mark.parametrize("impl", ["native", "python"])
def test_streams(make_engine: MakeEngine, impl: str) -> None:
    engine = make_engine(engine_impl=impl)
    engine.executor()
    one, other = engine.tokenizer(), engine.tokenizer()
    prompts = [list(range(1, 2 + 3 * n)) for n in range(12)]
    slots = [(one, one.submit(prompt, 10)) for prompt in prompts]
    slots += [(other, other.submit(prompt, 10)) for prompt in prompts]
    one.until(lambda: one.ended(*(slot for owner, slot in slots if owner is one)))
    other.until(lambda: other.ended(*(slot for owner, slot in slots if owner is other)))
    for (owner, slot), prompt in zip(slots, prompts * 2, strict=True):
        assert owner.tokens[slot] == continuation(prompt, 10)
        assert owner.finished[slot] is LENGTH
    assert one.messages < 12 * 10  # batches, never a message for each token
    engine.until_idle()
    assert engine.stats.generated_tokens_total == 240
    assert engine.stats.requests_finished_total == 24
    times = engine.stats.step_times
    assert min(times.plan, times.write_inputs, times.execute, times.sample, times.apply) > 0
    assert times.emit > 0


def test_the_welcome_waits_for_an_executor(make_engine: MakeEngine) -> None:
    engine = make_engine()
    tokenizer = engine.stranger()
    tokenizer.until(lambda: tokenizer.beats)
    assert not tokenizer.welcomes
    assert not tokenizer.beats[-1].executor_ready
    assert not engine.loop.snapshot.serving
    engine.executor(num_blocks=8)
    tokenizer.until(lambda: tokenizer.welcomes)
    [welcome] = tokenizer.welcomes
    assert welcome.epoch == 77
    assert welcome.max_sequence_len == 8 * BLOCK_SIZE < MAX_MODEL_LEN
    assert welcome.model.vocabulary_size == VOCABULARY
    engine.until(lambda: engine.loop.snapshot.serving)
    tokenizer.until(lambda: tokenizer.executor_ready)


def test_preemption_changes_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.executor(num_blocks=10)
    tokenizer = engine.tokenizer()
    slots = [tokenizer.submit([n, n + 1, n + 2], 30) for n in range(6)]
    tokenizer.until(lambda: tokenizer.ended(*slots))
    for n, slot in enumerate(slots):
        assert tokenizer.tokens[slot] == continuation([n, n + 1, n + 2], 30)
    assert engine.stats.preemptions_total > 0
    engine.until_idle()


def test_a_resumed_request_goes_on(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.executor()
    tokenizer = engine.tokenizer()
    whole = continuation([5, 6], 12)
    slot = tokenizer.submit([5, 6], 12, sent=whole[:7])
    tokenizer.until(lambda: tokenizer.ended(slot))
    assert tokenizer.tokens[slot] == whole[7:]


def test_refusals_and_failures_end_their_own_request_only(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.executor(step_seconds=0.01)
    tokenizer = engine.tokenizer()
    good = tokenizer.submit([1, 2, 3], 20)
    long = tokenizer.submit([1] * 250, 20)
    unknown = tokenizer.submit([VOCABULARY], 5)
    infinite = tokenizer.submit([NAN_TOKEN], 5)
    torn = stage_pb2.Submit(slot=99, prompt_token_ids=b"abc")
    tokenizer.send_submit(torn)
    tokenizer.until(lambda: tokenizer.ended(good, long, unknown, infinite, 99))
    assert isinstance(tokenizer.failed[long], TooLong)
    assert isinstance(tokenizer.failed[unknown], InvalidRequest)
    assert isinstance(tokenizer.failed[infinite], NotFinite)
    assert isinstance(tokenizer.failed[99], InvalidRequest)
    assert tokenizer.tokens[good] == continuation([1, 2, 3], 20)
    engine.until_idle()
    assert engine.stats.requests_refused_total == 3


def test_a_step_that_raises_ends_its_requests_and_no_more(make_engine: MakeEngine) -> None:
    engine = make_engine()
    executor = engine.executor()
    tokenizer = engine.tokenizer()
    bad = tokenizer.submit([RAISE_TOKEN], 5)
    tokenizer.until(lambda: tokenizer.ended(bad))
    assert isinstance(tokenizer.failed[bad], Unavailable)
    assert "told to raise" in str(tokenizer.failed[bad])
    good = tokenizer.submit([1], 5)
    tokenizer.until(lambda: tokenizer.ended(good))
    assert tokenizer.tokens[good] == continuation([1], 5)
    engine.until_idle()
    os.kill(executor.pid, 0)


def test_the_sampler_reads_the_ring_in_place(make_engine: MakeEngine) -> None:
    seen: list[tuple[int, int, bool]] = []
    native = sampler_of("native")

    class Spy:
        def __call__(
            self, logits: LogitsView, rows: list[SampleTuple], vocabulary_size: int
        ) -> list[int]:
            seen.append((logits.ctypes.data, logits.nbytes, logits.flags.writeable))
            return native(logits, rows, vocabulary_size)

    engine = make_engine(Spy())
    engine.executor()  # another process: the one logits ring in our maps is the one it writes
    tokenizer = engine.tokenizer()
    slots = [tokenizer.submit([n], 4) for n in range(3)]
    tokenizer.until(lambda: tokenizer.ended(*slots))
    [ring] = [
        line.split()
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "/memfd:triptych-logits" in line
    ]
    low, high = (int(each, 16) for each in ring[0].split("-"))
    assert ring[1] == "r--s"  # mapped read-only, shared
    assert seen
    for address, size, writable in seen:
        assert low <= address
        assert address + size <= high
        assert not writable


def test_a_bug_ends_the_loop_loudly(make_engine: MakeEngine) -> None:
    class Broken:
        def __call__(
            self, logits: LogitsView, rows: list[SampleTuple], vocabulary_size: int
        ) -> list[int]:
            return [vocabulary_size + 100] * len(rows)

    engine = make_engine(Broken())
    engine.executor()
    tokenizer = engine.tokenizer()
    tokenizer.submit([1], 4)
    tokenizer.until(lambda: engine.error)
    assert isinstance(engine.error, AssertionError)
    engine.error = None


# ------------------------------------------------------------------------------------------- aborts


def test_an_abort_within_a_step(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.executor(step_seconds=1.0)
    tokenizer = engine.tokenizer()
    gone, stays = tokenizer.submit([1, 2], 200), tokenizer.submit([3, 4], 2)
    tokenizer.until(lambda: engine.stats.slots_free < engine.stats.slots_total)
    tokenizer.abort(gone)
    # Taken in while the step runs, freed when it ends.
    engine.until(lambda: engine.stats.requests_aborted_total == 1, timeout=0.9)
    assert engine.stats.requests_tracked == 1
    tokenizer.until(lambda: tokenizer.ended(stays))
    assert tokenizer.tokens[stays] == continuation([3, 4], 2)
    assert not tokenizer.ended(gone)
    assert len(tokenizer.tokens[gone]) <= 1
    engine.until_idle()


def test_a_tokenizer_that_vanishes_gives_its_blocks_back(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.executor(step_seconds=0.01)
    gone, stays = engine.tokenizer(), engine.tokenizer()
    for n in range(5):
        gone.submit([n], 250)
    slot = stays.submit([1, 2], 60)
    gone.until(lambda: gone.messages > 2)
    gone.close()
    stays.until(lambda: engine.stats.requests_aborted_total == 5)
    stays.until(lambda: stays.ended(slot))
    assert stays.tokens[slot] == continuation([1, 2], 60)
    engine.until_idle()
    assert engine.stats.tokenizers_connected == 1


def test_a_silent_tokenizer_is_forgotten_and_told_so(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.executor(step_seconds=0.02)
    tokenizer = engine.tokenizer()
    slot = tokenizer.submit([1], 250)
    time.sleep(2.0)  # no beats: longer than the time-out
    engine.until_idle()
    assert engine.stats.tokenizers_connected == 0
    assert not tokenizer.ended(slot)
    tokenizer.until(lambda: tokenizer.told_to_start_again)
    tokenizer.say_hello()
    tokenizer.until(lambda: tokenizer.welcomes)
    again = tokenizer.submit([1], 3)
    tokenizer.until(lambda: tokenizer.ended(again))


def test_a_stall_of_the_scheduler_is_not_the_silence_of_others(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    engine.executor(step_seconds=0.02)
    tokenizer = engine.tokenizer()
    slot = tokenizer.submit([1], 60)
    tokenizer.until(lambda: len(tokenizer.tokens[slot]) > 3)
    monkeypatch.setattr(loop, "_now", lambda: time.perf_counter() + 100)
    tokenizer.until(lambda: tokenizer.ended(slot))
    assert tokenizer.tokens[slot] == continuation([1], 60)
    assert not tokenizer.told_to_start_again
    assert engine.stats.tokenizers_connected == 1
    assert engine.stats.executor_ready


# ------------------------------------------------------------------------------------------- deaths


@pytest.mark.parametrize("num_blocks", [64, 40, 80])
def test_an_executor_killed_in_a_step(make_engine: MakeEngine, num_blocks: int) -> None:
    """Whatever the new one's pool: no token is lost, doubled or changed."""
    engine = make_engine()
    first = engine.executor(step_seconds=0.03)
    tokenizer = engine.tokenizer()
    prompts = [list(range(n, n + 5)) for n in range(10)]
    slots = [tokenizer.submit(prompt, 25) for prompt in prompts]
    tokenizer.until(lambda: all(len(tokenizer.tokens[slot]) > 2 for slot in slots[:8]))
    first.kill()
    tokenizer.until(lambda: not tokenizer.executor_ready)
    assert not engine.loop.snapshot.serving
    engine.executor(num_blocks=num_blocks)
    tokenizer.until(lambda: tokenizer.ended(*slots))
    for slot, prompt in zip(slots, prompts, strict=True):
        assert tokenizer.tokens[slot] == continuation(prompt, 25)
    engine.until_idle()
    assert engine.stats.blocks_total == num_blocks


def test_a_request_that_no_longer_fits_fails(make_engine: MakeEngine) -> None:
    engine = make_engine()
    first = engine.executor(step_seconds=0.03)
    tokenizer = engine.tokenizer()
    large, small = tokenizer.submit([1], 100), tokenizer.submit([2], 20)
    tokenizer.until(lambda: len(tokenizer.tokens[small]) > 2)
    first.kill()
    engine.executor(num_blocks=10)
    tokenizer.until(lambda: tokenizer.ended(large, small))
    assert isinstance(tokenizer.failed[large], TooLong)
    assert tokenizer.tokens[small] == continuation([2], 20)
    assert tokenizer.welcomes[-1].model.num_blocks == 10
    assert tokenizer.welcomes[-1].max_sequence_len < tokenizer.welcomes[0].max_sequence_len
    engine.until_idle()


def test_an_executor_that_hangs_is_lost_and_may_come_back(make_engine: MakeEngine) -> None:
    engine = make_engine()
    executor = engine.executor(step_seconds=0.05)
    tokenizer = engine.tokenizer()
    slot = tokenizer.submit([1, 2, 3], 30)
    tokenizer.until(lambda: len(tokenizer.tokens[slot]) > 2)
    executor.pause()
    tokenizer.until(lambda: not tokenizer.executor_ready)
    executor.resume()  # its late StepDone is nobody's any more
    tokenizer.until(lambda: tokenizer.ended(slot))
    assert tokenizer.tokens[slot] == continuation([1, 2, 3], 30)
    engine.until_idle()


def test_an_executor_waits_for_the_next_scheduler(make_engine: MakeEngine, tmp_path: Path) -> None:
    first = make_engine()
    executor = first.executor()
    first.tokenizer()
    first.stop()
    second = Engine(first.run_dir.path, sampler_of("native"))
    try:
        tokenizer = second.tokenizer()
        slot = tokenizer.submit([4, 5], 6)
        tokenizer.until(lambda: tokenizer.ended(slot))
        assert tokenizer.tokens[slot] == continuation([4, 5], 6)
        os.kill(executor.pid, 0)
    finally:
        second.close()


# ----------------------------------------------------------------------------------------- refusals


def test_a_second_executor_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.executor()
    engine.tokenizer()
    code, said = engine.executor().wait(20)
    assert code == 2
    assert said.strip().splitlines()[-1] == (
        "triptych executor: error: the scheduler refused: another executor is connected"
    )
    tokenizer = engine.tokenizer()
    slot = tokenizer.submit([1], 3)
    tokenizer.until(lambda: tokenizer.ended(slot))


def test_an_executor_of_another_model_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    first = engine.executor()
    engine.tokenizer()
    first.kill()
    engine.until(lambda: not engine.stats.executor_ready)
    code, said = engine.executor(fingerprint="other").wait(20)
    assert code == 2
    assert "fingerprint: this scheduler serves fake-model, the executor has other" in said


def test_versions_must_match(make_engine: MakeEngine) -> None:
    engine = make_engine()
    tokenizer = engine.stranger(protocol_version=PROTOCOL_VERSION + 1)
    tokenizer.until(lambda: tokenizer.refused)
    assert tokenizer.refused == "this scheduler speaks protocol 1, the tokenizer 2"
    engine.executor()
    assert "the executor runs fake-model" in refusal(engine.stranger(fingerprint="other"))
    large = engine.stranger(vocabulary_size=VOCABULARY + 1)
    assert "98 is above the model's 97" in refusal(large)
    engine.tokenizer(vocabulary_size=VOCABULARY - 1)
    assert "97 differs from the 96 of others" in refusal(engine.stranger())


def refusal(tokenizer: FakeTokenizer) -> str:
    tokenizer.until(lambda: tokenizer.refused)
    return str(tokenizer.refused)


def hello(engine: Engine, *, model: stage_pb2.ModelFacts | None = None, **changes: int) -> str:
    """Say an executor's hello with changes; why it is refused."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    channel: DealerChannel[stage_pb2.ExecutorReply, stage_pb2.ExecutorMessage] = DealerChannel(
        context, engine.run_dir.executor_endpoint, stage_pb2.ExecutorReply, new_identity("e")
    )
    said = stage_pb2.ExecutorHello(
        protocol_version=PROTOCOL_VERSION, layout_version=LAYOUT_VERSION, model=model
    )
    for name, value in changes.items():
        setattr(said, name, value)
    channel.send(stage_pb2.ExecutorMessage(hello=said))
    assert channel.wait(5.0)
    [reply] = channel.receive()
    channel.close()
    context.term()
    return reply.refused.reason


def test_an_executor_hello_is_checked(make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert "the executor 1 with 9" in hello(engine, layout_version=9)
    assert "the executor 9 with 1" in hello(engine, protocol_version=9)
    assert hello(engine) == "vocabulary_size: the executor's 0 is below 1"
    one = stage_pb2.ModelFacts(vocabulary_size=9, max_model_len=1, block_size=1, num_blocks=1)
    assert hello(engine, model=one) == "max_model_len: the executor's 1 is below 2"


def test_nonsense_on_every_socket_does_no_harm(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.executor()
    tokenizer = engine.tokenizer()
    slot = tokenizer.submit([1, 2], 40)
    folder = engine.run_dir.path
    gigabyte = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL".ljust(64, b"\0") + b"\x06\0\0\0\0\x40\0\0\0"
    for junk in (b"\0", os.urandom(3000), b"\x80\x04\x95\x0b\0\0\0", gigabyte, b"x" * 64):
        for name, kind in [
            ("scheduler.zmq", socket.SOCK_STREAM),
            ("executor.zmq", socket.SOCK_STREAM),
            ("executor.fds", socket.SOCK_SEQPACKET),
        ]:
            with socket.socket(socket.AF_UNIX, kind) as raw:
                raw.connect(str(folder / name))
                raw.sendall(junk)
    for frames in ([b"\xff\xff"], [b"", b""], [os.urandom(200)]):
        bad = engine.stranger()
        bad.channel.socket.send_multipart(frames)
        assert refusal(bad) == "malformed message"
    tokenizer.until(lambda: tokenizer.ended(slot))
    assert tokenizer.tokens[slot] == continuation([1, 2], 40)
    engine.until_idle()
    assert engine.stats.executor_ready


def test_a_submit_before_the_hello_is_answered_with_epoch_0(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.executor()
    engine.tokenizer()
    stranger = engine.stranger(fingerprint="other")
    stranger.until(lambda: stranger.refused)
    stranger.submit([1], 3)
    stranger.until(lambda: stranger.told_to_start_again)
    assert engine.stats.requests_tracked == 0


# ------------------------------------------------------------------------------- the process itself


def start_scheduler(run_dir: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "triptych.services.scheduler", f"--run-dir={run_dir}"]
    return subprocess.Popen(
        [*command, "--heartbeat-interval=0.1", "--heartbeat-timeout=2"],
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_scheduler_process(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    scheduler = start_scheduler(folder)
    run_dir = RunDir.open(folder)
    executor = ExecutorProcess(folder)
    tokenizer = FakeTokenizer(run_dir)
    try:
        tokenizer.until(lambda: tokenizer.welcomes)
        second = start_scheduler(folder)
        _, said = second.communicate(timeout=30)
        assert second.returncode == 2
        assert said.startswith("triptych scheduler: error: another scheduler runs in")
        slot = tokenizer.submit([7, 8], 9)
        tokenizer.until(lambda: tokenizer.ended(slot))
        assert tokenizer.tokens[slot] == continuation([7, 8], 9)
        with grpc.insecure_channel(f"unix:{run_dir.control_socket('scheduler')}") as channel:
            stub = control_pb2_grpc.ControlServiceStub(channel)
            stats = stub.Stats(control_pb2.StatsRequest(), timeout=5)
        assert stats.process.ring_maps == 2
        assert stats.scheduler.generated_tokens_total == 9
        assert stats.scheduler.impl == "native"
    finally:
        scheduler.send_signal(signal.SIGTERM)
        _, said = scheduler.communicate(timeout=20)
        executor.kill()
        tokenizer.close()
    assert scheduler.returncode == 0, said
    assert "Traceback" not in said
