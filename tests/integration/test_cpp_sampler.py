"""examples/cpp/triptych_sampler.cc against an engine that a test plays: what it takes, what not."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from example_programs import BUILD_SECONDS, cpp_program
from fake_engine import Act, FakeEngine, fake_engine, told
from fake_sampler_engine import (
    EPOCH,
    SAMPLEABLE,
    SEALS,
    VOCABULARY,
    FakeSamplerEngine,
    fake_sampler_engine,
    memory_file,
    offer_of,
)
from triptych.engine_core.layout import LAYOUT_VERSION, LogitsLayout
from triptych.v1 import sampler_pb2

pytestmark = [pytest.mark.examples, pytest.mark.timeout(BUILD_SECONDS + 60)]

LAYOUT = LogitsLayout(num_slots=2, max_logits=1, vocabulary_size=VOCABULARY)


@pytest.fixture(scope="module")
def program() -> str:
    return cpp_program("own_sampler")[0]


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with fake_engine() as engine:
        yield engine


@pytest.fixture
def samplers(tmp_path: Path) -> Iterator[FakeSamplerEngine]:
    with fake_sampler_engine(tmp_path) as samplers:
        yield samplers


@contextmanager
def started(
    program: str, engine: FakeEngine, run_dir: Path, requests: int = 2
) -> "Iterator[subprocess.Popen[str]]":
    """The program; it asks `engine` for answers of five tokens once it has its lease."""
    command = [program, engine.address, str(run_dir), "--requests", str(requests)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def answer(engine: FakeEngine, running: "subprocess.Popen[str]") -> None:
    """Let its two requests end, and with them the program."""
    engine.expect(Act(told("hello")), Act(told("world")))
    written, said = running.communicate(timeout=20)
    assert (running.returncode, said) == (0, "")
    assert written.startswith("1: hello\n1: 104 101 108 108 111\n2: world\n")


def failure(running: "subprocess.Popen[str]") -> str:
    """What it says of why it ends."""
    written, said = running.communicate(timeout=20)
    assert (running.returncode, written) == (1, "")
    return said.removeprefix("own_sampler: ").rstrip()


def open_files(pid: int) -> list[str]:
    links = []
    for each in Path("/proc", str(pid), "fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            links.append(str(each.readlink()))
    return links


def row(likely: int, logit: float = 1.0) -> list[float]:
    return [logit if token == likely else -1.0 for token in range(VOCABULARY)]


def test_claims_a_lease_and_names_it(
    program: str, engine: FakeEngine, samplers: FakeSamplerEngine
) -> None:
    with started(program, engine, samplers.run_dir) as running:
        peer = samplers.accept()
        lease = peer.grant()
        assert (lease.layout_version, lease.num_rows) == (LAYOUT_VERSION, 2)
        answer(engine, running)
        peer.wait_gone()
    asked = [request.sampling_params.external_sampler for request in engine.requests]
    assert [(each.lease, each.tag) for each in asked] == [(lease.lease, 0), (lease.lease, 1)]


def test_draws_for_the_rows_of_a_packet(
    program: str, engine: FakeEngine, samplers: FakeSamplerEngine
) -> None:
    """In one answer; not for a row of another ticket, nor for one that there is not."""
    with started(program, engine, samplers.run_dir) as running:
        peer = samplers.accept()
        peer.grant()
        last = SAMPLEABLE - 1
        peer.rows.publish(0, 71, row(last))
        # Of two that are as likely the lower one; those that may not be drawn do not count.
        logits = [*row(3)[:SAMPLEABLE], *[9.0] * (VOCABULARY - SAMPLEABLE)]
        logits[7] = logits[3]
        peer.rows.publish(1, 2**64 - 1, logits)
        peer.ready((0, 71, 5, 0), (1, 2**64 - 1, 6, 1))
        assert peer.drawn() == [(0, 71, last), (1, 2**64 - 1, 3)]
        peer.rows.publish(1, 73, row(2))
        peer.ready((0, 70, 5, 0), (2, 71, 5, 0), (2**32 - 1, 0, 0, 0), (1, 73, 6, 2))
        assert peer.drawn() == [(1, 73, 2)]
        peer.ready((0, 70, 5, 0))
        peer.ready((1, 73, 6, 2))
        assert peer.drawn() == [(1, 73, 2)]
        answer(engine, running)


def test_claims_its_lease_again(
    program: str, engine: FakeEngine, samplers: FakeSamplerEngine
) -> None:
    """From the next scheduler, whose memory and vocabulary are its own; also where it is told to
    wait."""
    with started(program, engine, samplers.run_dir) as running:
        first = samplers.accept().grant()
        samplers.stop()
        samplers.start()
        samplers.accept().refuse("no model is loaded", retry=True)
        peer = samplers.accept()
        assert peer.grant(vocabulary=SAMPLEABLE + 40).lease == first.lease
        peer.rows.publish(1, 9, [float(token == 4) for token in range(SAMPLEABLE + 40)])
        peer.ready((1, 9, 1, 3))
        assert peer.drawn() == [(1, 9, 4)]
        answer(engine, running)


def test_waits_for_an_engine_that_starts(
    program: str, engine: FakeEngine, samplers: FakeSamplerEngine
) -> None:
    samplers.stop()
    with started(program, engine, samplers.run_dir) as running:
        samplers.start()
        samplers.accept().refuse("no model is loaded", retry=True)
        samplers.accept().grant()
        answer(engine, running)


def test_a_refusal_is_told(program: str, engine: FakeEngine, samplers: FakeSamplerEngine) -> None:
    with started(program, engine, samplers.run_dir) as running:
        samplers.accept().refuse("too many rows", retry=False)
        assert failure(running) == "the lease was refused: too many rows"
    assert not engine.requests


def test_a_run_directory_that_is_none_is_told_at_once(
    program: str, engine: FakeEngine, tmp_path: Path
) -> None:
    with started(program, engine, tmp_path / "none") as running:
        assert failure(running) == f"{tmp_path / 'none'}: No such file or directory"
    with started(program, engine, tmp_path / ("long" * 40)) as running:
        assert "long" in failure(running)


def header(layout: LogitsLayout = LAYOUT, epoch: int = EPOCH) -> bytes:
    return layout.header(epoch)


OTHER_ROWS = LogitsLayout(num_slots=3, max_logits=1, vocabulary_size=VOCABULARY)
OTHER_VOCABULARY = LogitsLayout(num_slots=2, max_logits=1, vocabulary_size=VOCABULARY - 1)


@pytest.mark.parametrize(
    ("begins", "size", "seals", "why"),
    [
        (header(), LAYOUT.total_bytes, 0, "not sealed"),
        (header(), LAYOUT.total_bytes - 1, SEALS, "not laid out"),
        (header(), LAYOUT.total_bytes + 64, SEALS, "not laid out"),
        (header(), 100, SEALS, "have no header"),
        (b"", LAYOUT.total_bytes, SEALS, "not laid out"),
        (header(epoch=EPOCH + 1), LAYOUT.total_bytes, SEALS, "not laid out"),
        (header(OTHER_ROWS), OTHER_ROWS.total_bytes, SEALS, "not laid out"),
        (header(OTHER_VOCABULARY), OTHER_VOCABULARY.total_bytes, SEALS, "not laid out"),
        (b"\1" + header()[1:], LAYOUT.total_bytes, SEALS, "not laid out"),
        (header()[:8] + b"\7" + header()[9:], LAYOUT.total_bytes, SEALS, "not laid out"),
        (header()[:12] + b"\1" + header()[13:], LAYOUT.total_bytes, SEALS, "not laid out"),
    ],
    ids=[
        "unsealed", "short", "long", "tiny", "empty", "epoch", "rows", "vocabulary", "magic",
        "version", "kind",
    ],
)  # fmt: skip
def test_memory_that_is_no_lease_is_not_read(
    program: str, engine: FakeEngine, samplers: FakeSamplerEngine,
    begins: bytes, size: int, seals: int, why: str,
) -> None:  # fmt: skip
    with started(program, engine, samplers.run_dir) as running:
        peer = samplers.accept()
        peer.lease()
        peer.send(offer_of(LAYOUT).SerializeToString(), memory_file(begins, size, seals))
        assert why in failure(running)


@pytest.mark.parametrize(
    ("packet", "why"),
    [
        (offer_of(LAYOUT).SerializeToString(), "did not offer rows"),
        (b"\xf8\x01\x00", "did not offer rows"),
        (b"\xff\xff\xff", "no message"),
        (b"x" * 70000, "no message"),
    ],
    ids=["no-descriptor", "unknown", "garbage", "overlong"],
)
def test_what_is_no_offer_is_told(
    program: str, engine: FakeEngine, samplers: FakeSamplerEngine, packet: bytes, why: str
) -> None:
    with started(program, engine, samplers.run_dir) as running:
        peer = samplers.accept()
        peer.lease()
        peer.send(packet)
        assert why in failure(running)


def test_keeps_no_descriptor_that_it_did_not_ask_for(
    program: str, engine: FakeEngine, samplers: FakeSamplerEngine
) -> None:
    """Nor the memory's own, once it is mapped."""
    with started(program, engine, samplers.run_dir) as running:
        peer = samplers.accept()
        peer.grant()
        peer.rows.publish(0, 5, row(1))
        ready = sampler_pb2.LogitsReady(rows=[sampler_pb2.ReadyRow(row=0, ticket=5)])
        packet = sampler_pb2.SamplerReply(ready=ready).SerializeToString()
        peer.send(packet, memory_file(header(), LAYOUT.total_bytes))
        assert peer.drawn() == [(0, 5, 1)]
        assert not [link for link in open_files(running.pid) if "memfd" in link]
        answer(engine, running)
