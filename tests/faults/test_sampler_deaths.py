"""Requests whose tokens a program draws, over plain gRPC, while stages die: no token is lost,
doubled or changed; and while programs die: their requests end, and nobody else's."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random

import grpc
import numpy as np
import pytest

from engine import Answer, Engine, generate_request, running_engine
from fault_mix import ENGINE, fault_model
from faults import BACK, KILLED_OFTEN
from grpc_errors import as_error, retry_delay
from raw_sampler import RawSampler, by_tag, claimed_again, drawn_by_tag
from triptych.client.sampler import ExternalSampler, LogitsRow
from triptych.services.runtime.run_dir import RunDir
from triptych.services.transport.rings import LogitsView
from triptych.v1 import common_pb2, control_pb2, sampler_pb2

pytestmark = pytest.mark.faults

FLAGS = (*ENGINE, *KILLED_OFTEN, "--sampler-timeout", "3")
LENGTH = 500
STREAMS = 3
PROMPTS = [f"Once upon a time {number}" for number in range(STREAMS)]
_SUPPORT = Path(__file__).parent.parent / "support"
_PROGRAM = """
import sys, time
sys.path.insert(0, sys.argv[1])
from raw_sampler import RawSampler, by_tag
from triptych.services.runtime.run_dir import RunDir
sampler = RawSampler(RunDir.open(sys.argv[2]))
sampler.claim(99)
print("claimed", flush=True)
while True:
    for row in sampler.ready():
        if row.position == int(sys.argv[3]):
            print("enough", flush=True)
        time.sleep(0.005 * (row.position > int(sys.argv[3])))  # so that it is met before the end
        sampler.draw(row, by_tag(sampler.logits(row), row))
"""
MANY = 50


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("samplers")
    with running_engine(fault_model(folder), folder / "run", *FLAGS) as engine:
        yield engine


def drawn(row: LogitsRow) -> int:
    """With noise of the tag and the position: another one for any other logits."""
    noise = np.random.default_rng([row.tag, row.position]).gumbel(size=len(row.logits))
    return int((np.asarray(row.logits) + noise).argmax())


def outside(lease: int, tag: int = 0) -> common_pb2.ExternalSampler:
    return common_pb2.ExternalSampler(lease=lease, tag=tag)


@contextmanager
def streaming(
    engine: Engine, who: Callable[[int], common_pb2.ExternalSampler | None], tokens: int = LENGTH
) -> Iterator[list["Future[Answer]"]]:
    """A stream for each prompt, half of them served when it begins. `who` draws stream i."""
    answers = [Answer() for _ in PROMPTS]

    def ask(index: int) -> Answer:
        external = who(index)
        own = {"temperature": 0.0} if external is None else {"external_sampler": external}
        request = generate_request(PROMPTS[index], max_tokens=tokens, ignore_eos=True, **own)
        for response in engine.stub.Generate(request, timeout=120):
            answers[index].add(response)
        return answers[index]

    with ThreadPoolExecutor(STREAMS) as pool:
        futures = [pool.submit(ask, index) for index in range(STREAMS)]
        wait_until(lambda: all(answer.token_ids for answer in answers), futures)
        yield futures


def wait_until(holds: Callable[[], bool], futures: "list[Future[Answer]] | None" = None) -> None:
    end = time.monotonic() + BACK
    while not holds():
        assert time.monotonic() < end
        for future in futures or []:
            if future.done():
                future.result()
        time.sleep(0.002)


def scheduler(engine: Engine) -> control_pb2.SchedulerStats:
    return engine.stats("scheduler").scheduler


def kill(engine: Engine, name: str) -> None:
    """And wait until another one serves."""
    pid = engine.pid(name)
    os.kill(pid, signal.SIGKILL)

    def is_back() -> bool:
        try:
            return engine.pid(name) != pid and scheduler(engine).executor_ready
        except grpc.RpcError:
            return False

    wait_until(is_back)


def all_back(engine: Engine) -> None:
    engine.wait_idle()
    wait_until(lambda: scheduler(engine).sampler_leases == scheduler(engine).sampler_rows_used == 0)


@pytest.mark.parametrize("names", [("scheduler",), ("executor-0",), ("executor-0", "scheduler")])
def test_stages_that_die(engine: Engine, names: tuple[str, ...], rounds: range) -> None:
    """Twice while the streams run; the sampler finds the next scheduler by itself."""
    source = Random(len(names[0]))
    for _ in rounds:
        with ExternalSampler(engine.run_dir, drawn, num_rows=STREAMS) as sampler:

            def who(index: int) -> common_pb2.ExternalSampler | None:
                params = sampler.params(tag=index)
                return params.external_sampler if index else None

            with streaming(engine, who) as futures:
                expected = [future.result().token_ids for future in futures]
            with streaming(engine, who) as futures:
                for _ in range(2):
                    time.sleep(0.05 * source.random())
                    assert not all(future.done() for future in futures), "there is none to disturb"
                    for name in names:
                        kill(engine, name)
                found = [future.result() for future in futures]
        assert [answer.token_ids for answer in found] == expected
        assert [answer.completion_tokens for answer in found] == [LENGTH] * STREAMS
        assert [answer.finish_count for answer in found] == [1] * STREAMS
        all_back(engine)


def test_a_position_that_comes_again_is_drawn_again(engine: Engine) -> None:
    """By hand: a scheduler dies with a row out; its successor asks for the same token."""
    run_dir = RunDir.open(engine.run_dir)
    first = RawSampler(run_dir)
    first.claim(7, 2)
    request = generate_request(
        "Once", max_tokens=5, ignore_eos=True, external_sampler=outside(7, 3)
    )
    stream = engine.stub.Generate(request, timeout=60)
    answer = Answer()
    for position in range(2):
        (row,) = first.ready()
        assert (row.tag, row.position) == (3, position)
        first.draw(row, by_tag(first.logits(row), row))
    (row,) = first.ready()
    logits = first.logits(row)
    os.kill(engine.pid("scheduler"), signal.SIGKILL)
    assert first.reply() is None
    first.close()
    with claimed_again(run_dir, 7, 2) as second:
        (again,) = second.ready()
        assert (again.tag, again.position) == (3, 2)
        assert again.ticket != row.ticket
        assert second.offer.epoch != first.offer.epoch
        assert np.array_equal(second.logits(again), logits)
        second.draw(again, by_tag(logits, again))
        with second.drawing(by_tag):
            for response in stream:
                answer.add(response)
    assert answer.token_ids == drawn_by_tag(3, 5)
    all_back(engine)


def test_a_program_that_dies_with_its_scheduler(engine: Engine) -> None:
    """Its requests wait for it as long as for a token, and then end; others go on."""
    sampler = RawSampler(RunDir.open(engine.run_dir))
    sampler.claim(8, 2)

    def slowly(logits: LogitsView, row: sampler_pb2.ReadyRow) -> int:
        time.sleep(0.005)  # so that the scheduler dies before the end
        return by_tag(logits, row)

    with (
        sampler.drawing(slowly),
        streaming(engine, lambda index: outside(8, index) if index == 0 else None) as futures,
    ):
        kill(engine, "scheduler")
        others = [future.result().token_ids for future in futures[1:]]
        with pytest.raises(grpc.RpcError) as caught:
            futures[0].result()
    sampler.close()
    error = as_error(caught.value)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert str(error.details()) == "no sampler has come for the lease 8 in 3 s (sampler_timeout)"
    with streaming(engine, lambda _: None) as futures:
        assert [future.result().token_ids for future in futures[1:]] == others
    all_back(engine)


def test_a_program_that_is_killed(engine: Engine) -> None:
    """And one that is stopped, until its time is up."""
    with streaming(engine, lambda _: None) as futures:
        expected = [future.result().token_ids for future in futures]
    for sig, code in (
        (signal.SIGKILL, grpc.StatusCode.UNAVAILABLE),
        (signal.SIGSTOP, grpc.StatusCode.DEADLINE_EXCEEDED),
    ):
        with subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(_SUPPORT), str(engine.run_dir), str(MANY)],
            stdout=subprocess.PIPE,
            text=True,
        ) as program:
            assert program.stdout is not None
            assert program.stdout.readline() == "claimed\n"
            with streaming(
                engine, lambda index: outside(99, index) if index == 1 else None, 900
            ) as futures:
                assert program.stdout.readline() == "enough\n"
                program.send_signal(sig)
                with pytest.raises(grpc.RpcError) as caught:
                    futures[1].result()
                for index in (0, 2):
                    assert futures[index].result().token_ids[:LENGTH] == expected[index]
            program.kill()
        error = as_error(caught.value)
        assert error.code() is code
        assert "sampler" in str(error.details())
        assert (retry_delay(error) is not None) == (code is grpc.StatusCode.UNAVAILABLE)
        all_back(engine)
