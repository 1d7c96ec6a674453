"""The programs of examples/ against a live engine: C++ and Go are built here, where they can be."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from engine import Engine, running_engine
from example_programs import (
    BUILD_SECONDS,
    cpp_program,
    go_program,
    python_program,
    without_numpy,
)
from fake_engine import Act, fake_engine, told
from free_port import free_ports
from leaving import until
from small_engines import SMALL, tiny_model
from triptych.engine_core.errors import QueueFull, Unavailable

pytestmark = [pytest.mark.e2e, pytest.mark.examples, pytest.mark.timeout(BUILD_SECONDS + 60)]

PROGRAMS: dict[str, Callable[[], list[str]]] = {
    "python": python_program,
    "cpp": cpp_program,
    "go": go_program,
}
WRITTEN = b"""\
cancelled after 3 pieces
== deadline
deadline exceeded, as it should be
== refused
refused: sampling_params.top_p
== session
"""
ABORTED = b"request 5 was aborted\n"
FOUR = b"".join(b"request %d: 16 tokens\n" % each for each in range(1, 5))


@pytest.fixture(scope="module", params=PROGRAMS)
def program(request: pytest.FixtureRequest) -> list[str]:
    return PROGRAMS[request.param]()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("examples")
    model = tiny_model(folder, max_position_embeddings=1024)
    with running_engine(model, folder / "run", *SMALL) as engine:
        yield engine


def run(program: list[str], *arguments: str) -> bytes:
    done = subprocess.run([*program, *arguments], capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    return done.stdout


def test_all_commands(program: list[str], engine: Engine) -> None:
    written = run(program, engine.address)
    text = engine.generate("Once upon a time", max_tokens=32, seed=1, ignore_eos=True).text
    assert written.startswith(f"== generate\n{text}\n[32 tokens]\n== chat\n".encode())
    cancelled = written[written.index(b"== cancel\n") + len(b"== cancel\n") :]
    assert cancelled.startswith((WRITTEN + ABORTED + FOUR, WRITTEN + FOUR))  # or it was too fast
    engine.wait_idle()


def test_a_session_aborts_one_of_its_requests(program: list[str], engine: Engine) -> None:
    aborted = engine.wait_idle().requests_aborted_total
    command = [*program, engine.address, "session"]
    with ExitStack() as stack:
        with engine.frozen():  # so that it does not end before
            running = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            until(lambda: engine.stats("scheduler").scheduler.requests_aborted_total > aborted)
        written = running.communicate(timeout=120)[0]
    assert written == b"== session\n" + ABORTED + FOUR
    assert engine.wait_idle().requests_aborted_total == aborted + 1


def test_a_refused_request_is_sent_again_when_the_engine_said(program: list[str]) -> None:
    with fake_engine() as engine:
        engine.expect(
            Act(error=Unavailable("down", retry_after_ms=50)),
            Act(error=QueueFull("full", retry_after_ms=50)),
            Act(told("hello", 2)),
        )
        assert run(program, engine.address, "generate") == b"== generate\nhello\n[5 tokens]\n"
        assert len(engine.requests) == 3


def test_an_engine_that_is_not_there_yet_is_waited_for(program: list[str]) -> None:
    """Back-off begins with connections that are refused; it may not end with them."""
    (port,) = free_ports(1)
    command = [*program, f"127.0.0.1:{port}", "generate"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as waiting:
        time.sleep(1)  # a few attempts
        with fake_engine(port=port) as engine:
            engine.expect(Act(told("hello", 2)))
            assert waiting.communicate(timeout=60)[0] == b"== generate\nhello\n[5 tokens]\n"


def test_a_stream_goes_on_when_the_executor_is_killed(program: list[str], engine: Engine) -> None:
    """The engine's doing: the client sees a pause."""
    command = [*program, engine.address, "generate", "Once", "400"]
    undisturbed = subprocess.run(command, capture_output=True, timeout=120, check=True).stdout
    assert undisturbed.endswith(b"[400 tokens]\n")
    pid = engine.pid("executor-0")

    def is_killed() -> bool:
        """In the middle of the answer, which is whole all the same."""
        with subprocess.Popen(command, stdout=subprocess.PIPE) as running:
            assert running.stdout is not None
            head = os.read(running.stdout.fileno(), 16)
            while head.count(b"\n") < 1 or head.endswith(b"== generate\n"):
                head += os.read(running.stdout.fileno(), 16)
            killed = engine.kill_midway("executor-0")
            rest = running.stdout.read()
        assert running.returncode == 0
        assert head + rest == undisturbed
        return killed

    assert any(is_killed() for _ in range(10))  # a busy machine may be late
    assert engine.pid("executor-0") != pid
    engine.wait_idle()


def test_what_fails_is_said(program: list[str]) -> None:
    done = subprocess.run(
        [*program, "127.0.0.1:1", "nothing"], capture_output=True, timeout=120, check=False
    )
    assert done.returncode != 0
    assert b"usage: " in done.stderr


@pytest.mark.parametrize("numpy", [True, False])
def test_python_draws_tokens_itself(engine: Engine, numpy: bool) -> None:
    """tests/e2e/test_own_sampler.py has the rest."""
    program = python_program("own_sampler")
    if not numpy:
        program = without_numpy(program)
    place = (engine.address, str(engine.run_dir))
    greedy = engine.generate("Once upon a time", max_tokens=32, temperature=0)
    written = run(program, *place).decode()
    assert written == f"{greedy.text}\n[{greedy.completion_tokens} tokens]\n"
    drawn = [run(program, *place, "Once", "48", "40", seed) for seed in ("1", "2", "1")]
    assert drawn[0] == drawn[2]
    assert drawn[0] != drawn[1]
    assert drawn[0] == run(without_numpy(python_program("own_sampler")), *place, "Once", "48", "40")
    engine.wait_idle()


def test_an_own_sampler_says_why_it_cannot(engine: Engine) -> None:
    program = python_program("own_sampler")
    for arguments, said in (
        ((), b"usage: own_sampler.py ADDRESS RUN_DIR"),
        ((engine.address, "/nowhere"), b"own_sampler: FAILED_PRECONDITION: /nowhere is not a"),
    ):
        done = subprocess.run([*program, *arguments], capture_output=True, timeout=60, check=False)
        assert done.returncode == 1
        assert said in done.stderr
