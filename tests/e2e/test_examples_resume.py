"""examples/cpp and examples/go: an answer whose connection breaks goes on. Relays show what comes.

What a resumed answer is made of is compared with what the Python client makes of the same.
"""

import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

import grpc
import pytest

from cut_answers import told_otherwise
from engine import generate_request
from example_programs import BUILD_SECONDS, cpp_program, go_program
from fake_engine import Act, FakeEngine, Response, fake_engine, told
from free_port import break_connections, free_ports
from relayed import relayed, relaying, responses_in
from triptych.client.answer import joined
from triptych.client.received import Received
from triptych.engine_core.errors import QueueFull, Unavailable
from triptych.v1 import common_pb2, inference_pb2
from triptych.v1.inference_pb2 import GenerateRequest

pytestmark = [pytest.mark.e2e, pytest.mark.examples, pytest.mark.timeout(BUILD_SECONDS + 60)]

RELAYS: dict[str, Callable[[str], list[str]]] = {"cpp": cpp_program, "go": go_program}
BROKEN = grpc.StatusCode.UNAVAILABLE
ATTEMPTS = 8  # of the policy of both


@pytest.fixture(scope="module", params=RELAYS)
def streams(request: pytest.FixtureRequest) -> list[str]:
    """Of the library's streams."""
    return RELAYS[request.param]("relay")


@pytest.fixture(scope="module", params=["stream", "session"])
def relay(request: pytest.FixtureRequest, streams: list[str]) -> list[str]:
    """Of its streams, and of its sessions."""
    return [*streams, "--session"] if request.param == "session" else streams


@pytest.fixture
def fake() -> Iterator[FakeEngine]:
    with fake_engine() as engine:
        yield engine


def taken(attempts: Sequence[Sequence[Response]]) -> list[Response]:
    """What the Python client makes of these attempts."""
    received: Received[Response] = Received()
    new: list[Response] = []
    for attempt in attempts:
        received.again()
        new += [piece for each in attempt if (piece := received.take(each)) is not None]
    return new


def texts(responses: Sequence[Response]) -> list[str]:
    return [each.text for each in responses]


@pytest.mark.parametrize("seed", range(5))
def test_everything_goes_on_as_in_python(relay: list[str], fake: FakeEngine, seed: int) -> None:
    """Two choices with reasoning, text, ids, logprobs, calls and ends, broken at three places."""
    cuts = Random(seed)
    tellings = [told_otherwise(cuts) for _ in range(4)]
    attempts = [telling[: cuts.randrange(1, len(telling))] for telling in tellings[:3]]
    attempts.append(tellings[3])
    fake.expect(*(Act(each, bare=BROKEN) for each in attempts[:3]), Act(attempts[3]))
    responses, error = relayed(relay, fake.address, inference_pb2.ChatRequest())
    assert not error
    assert responses == taken(attempts)
    answer, undisturbed = joined(responses), joined(tellings[0])
    for choice in (*answer.choices, *undisturbed.choices):
        for call in choice.tool_calls:
            assert re.fullmatch(r"call_[\d.e-]+", call.id), "each call has one id"
            call.id = ""
    assert answer == undisturbed
    ended = [each.index for each in responses if each.finish_reason]
    assert sorted(ended) == [0, 1]


@pytest.mark.parametrize("broken", [True, False])
def test_broken_or_cut_off_it_goes_on(relay: list[str], fake: FakeEngine, broken: bool) -> None:
    request = generate_request("x", seed=5)
    fake.expect(Act(told("hé", 1, end=False), bare=BROKEN if broken else None))
    fake.expect(Act(told("héllo", 4)))
    responses, error = relayed(relay, fake.address, request)
    assert not error
    assert texts(responses) == ["h", "é", "ll", "o"]
    assert fake.requests == [request, request]


def test_what_breaks_behind_its_end_is_whole(relay: list[str], fake: FakeEngine) -> None:
    fake.expect(Act(told("ab"), bare=BROKEN))
    responses, error = relayed(relay, fake.address, generate_request("x"))
    assert not error
    assert texts(responses) == ["ab"]
    assert (len(fake.requests), fake.sessions) == (1, int("--session" in relay))


def test_told_to_come_later_it_goes_on(relay: list[str], fake: FakeEngine) -> None:
    fake.expect(Act(told("ab", end=False), bare=BROKEN))
    fake.expect(Act(error=Unavailable("x", retry_after_ms=10)))
    fake.expect(Act(error=QueueFull("x", retry_after_ms=10)))
    fake.expect(Act(told("abc")))
    responses, failed = relayed(relay, fake.address, generate_request("x"))
    assert not failed
    assert texts(responses) == ["ab", "c"]


@pytest.mark.parametrize("close", [True, False])
def test_requests_of_a_session_come_later_apart(
    streams: list[str], fake: FakeEngine, close: bool
) -> None:
    """Two requests; the first one is refused after the break, the second one goes on."""
    flags = ("--session", "--twice", *(() if close else ("--open",)))
    fake.expect(Act(told("ab", end=False)), Act(told("vwxyz", end=False), bare=BROKEN))
    fake.expect(Act(error=Unavailable("x", retry_after_ms=10)), Act(told("vwxyz")))
    fake.expect(Act(told("abcd")))
    responses, failed = relayed(streams, fake.address, generate_request("x"), *flags)
    assert not failed
    assert texts(responses) == ["ab", "vwxyz", "", "cd"]
    assert fake.sessions == (3 if close else 2)


def test_others_go_on_while_a_request_of_a_session_waits(
    streams: list[str], fake: FakeEngine
) -> None:
    fake.expect(Act(told("ab", end=False)), Act(told("vwxyz", end=False), bare=BROKEN))
    fake.expect(Act(error=Unavailable("x", retry_after_ms=25_000)), Act(told("vwxyz!")))
    fake.expect(Act(told("abc")))
    request = generate_request("x")
    command = relaying(streams, fake.address, request, "--session", "--twice", "--open")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        running.stdin.write(request.SerializeToString())
        running.stdin.close()
        try:
            written = b""
            while b"!" not in written:
                piece = os.read(running.stdout.fileno(), 4096)
                assert piece, written
                written += piece
            time.sleep(0.5)  # for one that had been sent before
            assert len(fake.requests) == 4
        finally:
            running.kill()


def test_a_session_reads_while_it_starts_again(streams: list[str], fake: FakeEngine) -> None:
    """This engine takes the second request when all that it says of the first one is read."""
    cuts = range(250_000, 3_000_000, 250_000)
    whole = told("ab" + "c" * 2_999_998, *cuts)
    fake.expect(Act(told("ab", end=False)), Act(told("ab", end=False), bare=BROKEN))
    fake.expect(Act(whole), Act(whole))
    request = generate_request("x" * 3_000_000)
    responses, error = relayed(streams, fake.address, request, "--session", "--twice")
    assert not error
    assert sum(map(len, texts(responses))) == 6_000_000


def test_refused_again_and_again_it_ends(relay: list[str], fake: FakeEngine) -> None:
    fake.expect(Act(told("ab", end=False), bare=BROKEN))
    fake.expect(*[Act(error=QueueFull("x", retry_after_ms=10))] * (2 * ATTEMPTS))
    flags = ("--first-wait", "10", "--open")  # a closed session ends with its stream
    responses, error = relayed(relay, fake.address, generate_request("x"), *flags)
    assert error.startswith("8 ")
    assert texts(responses) == ["ab"]
    assert fake.acts.qsize() > 0


def test_a_seed_is_drawn_where_none_is(relay: list[str], fake: FakeEngine) -> None:
    beam = generate_request("x", beam=common_pb2.BeamSearch(width=2))
    sent = [generate_request("x"), generate_request("x"), beam]
    for request in sent:
        fake.expect(Act(told("a", end=False), bare=BROKEN), Act(told("a")))
        assert relayed(relay, fake.address, request)[1] == ""
    first, again, second, _, *beams = fake.requests
    assert first.sampling_params.HasField("seed")
    assert first == again
    assert second.sampling_params.seed != first.sampling_params.seed
    assert beams == [beam, beam]


@pytest.mark.parametrize(
    ("first", "again", "named"),
    [
        (told("abcd", end=False), told("abXd", 1), "text: item 2"),
        (told("ab", end=False), told("a"), "text: 2 items were received"),
        (
            [inference_pb2.GenerateResponse(text="ab", token_ids=[1, 2])],
            [inference_pb2.GenerateResponse(text="ab", token_ids=[1, 3])],
            "token_ids: item 1",
        ),
        (
            [inference_pb2.GenerateResponse(finish_reason=common_pb2.FINISH_REASON_STOP)],
            [inference_pb2.GenerateResponse(finish_reason=common_pb2.FINISH_REASON_LENGTH)],
            "finish_reason: was FINISH_REASON_STOP, told again it is FINISH_REASON_LENGTH",
        ),
    ],
)
def test_another_answer_is_refused(
    relay: list[str], fake: FakeEngine, first: list[Response], again: list[Response], named: str
) -> None:
    fake.expect(Act(first, bare=BROKEN), Act([*again, *told("more")]))
    responses, error = relayed(relay, fake.address, generate_request("x"))
    typed = "" if "--session" in relay else "mismatch "  # an event has the code only
    assert error.startswith(f"{grpc.StatusCode.DATA_LOSS.value[0]} {typed}{named}")
    assert joined(responses) == joined(taken([first, again[:-1]]))


def test_of_a_closed_session_only_the_one_that_differs_ends(
    streams: list[str], fake: FakeEngine
) -> None:
    """Nothing may be sent any more that would cancel it."""
    fake.expect(Act(told("ab", end=False)), Act(told("vw", end=False), bare=BROKEN))
    fake.expect(Act(told("aX")), Act(told("vwxyz")))
    request = generate_request("x")
    responses, error = relayed(streams, fake.address, request, "--session", "--twice")
    assert error.startswith(f"{grpc.StatusCode.DATA_LOSS.value[0]} text: item 1")
    assert texts(responses) == ["ab", "vw", "xyz"]


def test_a_cancel_ends_a_back_off(streams: list[str], fake: FakeEngine) -> None:
    fake.expect(Act(told("ab", end=False), bare=BROKEN))
    flags = ("--first-wait", "600000", "--longest-wait", "600000", "--cancel", "1500")
    responses, error = relayed(streams, fake.address, generate_request("x"), *flags)
    assert error.startswith(f"{grpc.StatusCode.CANCELLED.value[0]} ")
    assert texts(responses) == ["ab"]


def test_switched_off_it_ends(relay: list[str], fake: FakeEngine) -> None:
    """And draws no seed."""
    request = generate_request("x")
    fake.expect(Act(told("ab", 1, end=False), bare=BROKEN))
    responses, error = relayed(relay, fake.address, request, "--no-resume")
    assert error.startswith("14 ")
    assert texts(responses) == ["a", "b"]
    assert fake.requests == [request]


def test_switched_off_what_was_refused_is_sent_again(streams: list[str], fake: FakeEngine) -> None:
    fake.expect(Act(bare=BROKEN), Act(told("ab")))
    responses, error = relayed(streams, fake.address, generate_request("x"), "--no-resume")
    assert not error
    assert texts(responses) == ["ab"]


def test_what_brings_something_new_has_all_attempts_again(
    relay: list[str], fake: FakeEngine
) -> None:
    text = "abcdefghijkl"
    breaks = [Act(told(text[:end], end=False), bare=BROKEN) for end in range(1, len(text))]
    assert len(breaks) > ATTEMPTS
    fake.expect(*breaks, Act(told(text)))
    responses, error = relayed(relay, fake.address, generate_request("x"))
    assert not error
    assert texts(responses) == [*text]


def test_breaks_that_bring_nothing_new_are_counted(relay: list[str], fake: FakeEngine) -> None:
    fake.expect(*[Act(told("a", end=False), bare=BROKEN)] * (ATTEMPTS + 1))
    responses, error = relayed(relay, fake.address, generate_request("x"), "--first-wait", "10")
    assert error.startswith("14 ")
    assert texts(responses) == ["a"]
    assert len(fake.requests) == ATTEMPTS


def test_the_requests_own_time_out_counts_on(relay: list[str], fake: FakeEngine) -> None:
    request = generate_request("x")
    request.timeout_ms = 60_000
    fake.expect(held(told("a", end=False), 0.2), held((), 0.2), Act(told("ab")))
    assert relayed(relay, fake.address, request)[1] == ""
    first, second, third = (each.timeout_ms for each in fake.requests)
    assert first == 60_000
    assert second <= 59_800
    assert 0 < third <= 59_600


def test_the_requests_own_time_out_passes(relay: list[str], fake: FakeEngine) -> None:
    request = generate_request("x")
    request.timeout_ms = 100
    fake.expect(held(told("a", end=False), 0.2))
    responses, error = relayed(relay, fake.address, request)
    assert error.startswith("4 ")
    assert texts(responses) == ["a"]
    assert len(fake.requests) == 1


def test_the_calls_deadline_is_for_all_attempts(streams: list[str], fake: FakeEngine) -> None:
    fake.expect(
        Act(told("a", end=False), error=Unavailable("down", retry_after_ms=10)),
        Act(told("a", end=False), hold=(held_back := threading.Event())),
    )
    responses, error = relayed(streams, fake.address, generate_request("x"), "--timeout", "4000")
    held_back.set()
    assert error.startswith("4 ")
    assert texts(responses) == ["a"]


def test_a_session_goes_on_with_what_has_not_ended(streams: list[str], fake: FakeEngine) -> None:
    """The fifth is cancelled by then, and is again."""
    program = str(Path(streams[0]).with_name("example"))
    whole = told("0123456789abcdef")
    aborted = inference_pb2.GenerateResponse(finish_reason=common_pb2.FINISH_REASON_ABORT)
    aborted.usage.prompt_tokens = 1
    fake.expect(Act(whole), Act(whole[:1]), Act(told("0123", end=False), bare=BROKEN))
    fake.expect(Act(whole), Act(whole), Act([aborted]))
    done = subprocess.run(
        [program, fake.address, "session"], capture_output=True, timeout=120, check=False
    )
    assert done.stderr == b""
    assert done.stdout.splitlines() == [
        b"== session",
        b"request 5 was aborted",
        *[b"request %d: 16 tokens" % each for each in (1, 2, 3, 4)],
    ]
    assert fake.sessions == 2
    assert [each.text for each in fake.requests if isinstance(each, GenerateRequest)] == [
        *["Request"] * 3,
        *["Request"] * 2,
        "Unwanted",
    ]
    assert fake.session_cancels.get(timeout=30) == 5


def held(responses: Sequence[Response], seconds: float) -> Act:
    """It breaks no sooner than that."""
    hold = threading.Event()

    class _Late(list[Response]):
        def __iter__(self) -> Iterator[Response]:
            threading.Timer(seconds, hold.set).start()  # from when it is being told
            return super().__iter__()

    return Act(_Late(responses), bare=BROKEN, hold=hold)


def test_a_back_off_ends_with_the_connection(relay: list[str]) -> None:
    """Whoever sat this one out would time out."""
    (port,) = free_ports(1)
    hold = threading.Event()
    request = inference_pb2.GenerateRequest()
    asking = relaying(relay, f"127.0.0.1:{port}", request, "--first-wait", "600000")
    asking += ["--longest-wait", "600000"]
    with subprocess.Popen(asking, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        with fake_engine(port=port) as engine:
            engine.expect(Act(told("he", end=False), hold=hold))
            written = os.read(running.stdout.fileno(), 4096)
        hold.set()
        break_connections(port)
        with fake_engine(port=port) as engine:
            engine.expect(Act(told("hello")))
            try:
                written += running.communicate(timeout=60)[0]
            finally:
                running.kill()
    assert texts(responses_in(written, request)) == ["he", "llo"]
