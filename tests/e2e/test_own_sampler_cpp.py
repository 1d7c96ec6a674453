"""examples/cpp/own_sampler against a live engine: the program draws the tokens itself."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from engine import Engine, running_engine
from example_programs import BUILD_SECONDS, cpp_program
from free_port import free_ports
from small_engines import SMALL, tiny_model
from triptych.v1 import control_pb2

pytestmark = [pytest.mark.e2e, pytest.mark.examples, pytest.mark.timeout(BUILD_SECONDS + 60)]

ROWS = 4
LONG = ("--requests", str(ROWS), "--tokens", "900")
GRACE = 30.0


@pytest.fixture(scope="module")
def program() -> str:
    return cpp_program("own_sampler")[0]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("own-sampler")
    model = tiny_model(folder, max_position_embeddings=1024)
    # A tokenizer that is started again has to be where it was.
    flags = ("--sampler-rows", str(ROWS), "--port", str(free_ports(1)[0]))
    with running_engine(model, folder / "run", *SMALL, *flags) as engine:
        yield engine


def command(program: str, engine: Engine, *arguments: str) -> list[str]:
    return [program, engine.address, str(engine.run_dir), *arguments]


def run(program: str, engine: Engine, *arguments: str) -> bytes:
    done = subprocess.run(
        command(program, engine, *arguments), capture_output=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    return done.stdout


def scheduler(engine: Engine) -> control_pb2.SchedulerStats:
    return engine.stats("scheduler").scheduler


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + GRACE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def drawing(program: str, engine: Engine) -> "Iterator[subprocess.Popen[bytes]]":
    """The program as it draws for all its requests, stopped in the middle of them."""
    for _ in range(10):  # it may be too fast to be caught by a busy machine
        wanted = scheduler(engine).external_tokens_total + 8 * ROWS
        with subprocess.Popen(command(program, engine, *LONG), stdout=subprocess.PIPE) as running:
            try:
                wait_until(
                    lambda: scheduler(engine).external_tokens_total > wanted  # noqa: B023  # called at once
                )
                running.send_signal(signal.SIGSTOP)
                if scheduler(engine).sampler_rows_used == ROWS:
                    yield running
                    return
            finally:
                running.kill()
        wait_until(lambda: without_a_lease(engine))
    raise AssertionError("it was too fast to be caught")


def without_a_lease(engine: Engine) -> bool:
    stats = scheduler(engine)
    return not (stats.sampler_leases or stats.sampler_rows or stats.sampler_rows_used)


def greedy(engine: Engine) -> list[int]:
    """Of somebody who has no sampler."""
    answer = engine.generate("Once", max_tokens=32, temperature=0, ignore_eos=True)
    return answer.token_ids


@pytest.mark.parametrize("requests", [1, ROWS])
def test_draws_what_the_engine_would(program: str, engine: Engine, requests: int) -> None:
    before = scheduler(engine).external_tokens_total
    arguments = ("--requests", str(requests), "--tokens", "48")
    own = run(program, engine, *arguments)
    assert scheduler(engine).external_tokens_total - before == requests * 48
    assert own.count(b"\n") >= 2 * requests
    assert own == run(program, engine, *arguments, "--builtin")
    assert scheduler(engine).external_tokens_total - before == requests * 48
    engine.wait_idle()
    wait_until(lambda: without_a_lease(engine))


def test_killed_it_leaves_nothing_behind(program: str, engine: Engine) -> None:
    others = greedy(engine)
    with drawing(program, engine) as running:
        running.kill()
        running.wait(GRACE)
        assert greedy(engine) == others
    wait_until(lambda: without_a_lease(engine))
    engine.wait_idle()
    # A successor gets all rows, and what it draws is right.
    arguments = ("--requests", str(ROWS), "--tokens", "8")
    assert run(program, engine, *arguments) == run(program, engine, *arguments, "--builtin")


@pytest.mark.parametrize("stage", ["scheduler", "executor-0", "tokenizer-0"])
def test_its_requests_outlive(program: str, engine: Engine, stage: str) -> None:
    undisturbed = run(program, engine, *LONG)
    with drawing(program, engine) as running:
        os.kill(engine.pid(stage), signal.SIGKILL)
        running.send_signal(signal.SIGCONT)
        written, _ = running.communicate(timeout=60)
    assert running.returncode == 0
    assert written == undisturbed
    engine.wait_idle()


def test_more_rows_than_there_are_cannot_be_leased(program: str, engine: Engine) -> None:
    done = subprocess.run(
        command(program, engine, "--requests", str(ROWS + 1)),
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert b"the lease was refused: " in done.stderr
    wait_until(lambda: without_a_lease(engine))
