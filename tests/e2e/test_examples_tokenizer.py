"""examples/: an answer goes on when the tokenizer process that told it is killed."""

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine import Engine, generate_request, running_engine
from example_programs import BUILD_SECONDS, cpp_program, go_program, python_program
from free_port import free_ports
from relayed import relayed, relaying, responses_in
from small_engines import SMALL, tiny_model
from triptych.client.answer import joined

pytestmark = [pytest.mark.e2e, pytest.mark.examples, pytest.mark.timeout(BUILD_SECONDS + 60)]

PROGRAMS: dict[str, Callable[[], list[str]]] = {
    "python": python_program,
    "cpp": cpp_program,
    "go": go_program,
}
RELAYS: dict[str, Callable[[str], list[str]]] = {"cpp": cpp_program, "go": go_program}
ATTEMPTS = 10  # to be in the middle: a busy machine may be late


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """On a port that its next tokenizer has again."""
    folder = tmp_path_factory.mktemp("killed")
    model = tiny_model(folder, max_position_embeddings=1024)
    port = str(free_ports(1)[0])
    flags = ("--port", port, "--restart-window", "0", "--max-restarts", "1000")
    with running_engine(model, folder / "run", *SMALL, *flags) as engine:
        yield engine


@pytest.fixture(scope="module", params=PROGRAMS)
def program(request: pytest.FixtureRequest) -> list[str]:
    return PROGRAMS[request.param]()


@pytest.fixture(scope="module", params=["cpp", "cpp session", "go", "go session"])
def relay(request: pytest.FixtureRequest) -> list[str]:
    """Of a library's streams, and of its sessions."""
    name, _, session = request.param.partition(" ")
    return [*RELAYS[name]("relay"), *(["--session"] if session else [])]


def killed_in_the_middle(
    engine: Engine, command: list[str], begun: bytes, stdin: Path = Path(os.devnull)
) -> bytes:
    """All that a program writes whose tokenizer is killed when it has written so much."""
    for _ in range(ATTEMPTS):
        pid = engine.pid("tokenizer-0")
        with (
            stdin.open("rb") as source,
            subprocess.Popen(command, stdin=source, stdout=subprocess.PIPE) as running,
        ):
            assert running.stdout is not None
            written = b""
            while not re.search(begun, written, re.DOTALL):
                piece = os.read(running.stdout.fileno(), 4096)
                assert piece, written
                written += piece
            killed = engine.kill_midway("tokenizer-0")
            written += running.stdout.read()
        assert running.returncode == 0
        if killed:
            assert engine.pid("tokenizer-0") != pid
            return written
    raise AssertionError("it was never in the middle")


def test_a_stream_goes_on(program: list[str], engine: Engine) -> None:
    command = [*program, engine.address, "generate", "Once", "800"]
    undisturbed = subprocess.run(command, capture_output=True, timeout=120, check=True).stdout
    assert undisturbed.endswith(b"[800 tokens]\n")
    assert killed_in_the_middle(engine, command, rb"== generate\n.") == undisturbed
    engine.wait_idle()


def test_choices_and_logprobs_go_on_too(relay: list[str], engine: Engine, tmp_path: Path) -> None:
    request = generate_request(
        "Once", max_tokens=400, n=2, logprobs=1, prompt_logprobs=1, ignore_eos=True, seed=3
    )
    undisturbed, error = relayed(relay, engine.address, request)
    assert not error
    asked = tmp_path / "request"
    asked.write_bytes(request.SerializeToString())
    # Long waits, so that attempts do not run out on a slow machine: they end with the connection.
    command = relaying(relay, engine.address, request, "--first-wait", "2000")
    written = killed_in_the_middle(engine, command, b"." * 1000, asked)
    answer = joined(responses_in(written, request))
    assert [len(each.logprobs) for each in answer.choices] == [400, 400]
    assert answer == joined(undisturbed)
    engine.wait_idle()
