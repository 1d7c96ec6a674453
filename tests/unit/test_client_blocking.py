"""The synchronous client against a scripted service: retries, resume, errors, cancel, deadlines."""

import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from fake_engine import Act, FakeEngine, fake_engine, told
from triptych.client.api import (
    Cancelled,
    ChatMessage,
    ChatResponse,
    Client,
    ClientOptions,
    DeadlineExceeded,
    FinishReason,
    GenerateRequest,
    InvalidRequest,
    QueueFull,
    ResumeMismatch,
    RetryPolicy,
    SamplingParams,
    Unavailable,
)
from triptych.engine_core import errors as engine_errors
from triptych.v1 import common_pb2

QUICK = RetryPolicy(attempts=3, first_wait=0.001, longest_wait=0.002)
BUSY = engine_errors.QueueFull("full", retry_after_ms=1)
DOWN = engine_errors.Unavailable("down", retry_after_ms=1)


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with fake_engine() as engine:
        yield engine


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[Client]:
    with Client(engine.address, ClientOptions(timeout=60, retry=QUICK)) as client:
        yield client


def test_pieces_come_as_they_are(engine: FakeEngine, client: Client) -> None:
    engine.expect(Act(told("hello", 2)))
    pieces = list(client.generate("say", SamplingParams(max_tokens=5)))
    assert [piece.text for piece in pieces] == ["he", "llo"]
    (request,) = engine.requests
    assert isinstance(request, GenerateRequest)
    assert (request.text, request.sampling_params.max_tokens) == ("say", 5)


def test_a_whole_answer(engine: FakeEngine, client: Client) -> None:
    engine.expect(Act(told("hello", 2)))
    answer = client.generate([1, 2, 3]).answer()
    assert (answer.text, answer.token_ids) == ("hello", [*map(ord, "hello")])
    assert answer.finish_reason == FinishReason.FINISH_REASON_LENGTH
    assert answer.usage.completion_tokens == 5
    (request,) = engine.requests
    assert isinstance(request, GenerateRequest)
    assert list(request.token_ids.ids) == [1, 2, 3]


def test_chat_forms(engine: FakeEngine, client: Client) -> None:
    end = ChatResponse(text="hi", reasoning="hm", finish_reason=common_pb2.FINISH_REASON_STOP)
    end.usage.completion_tokens = 1
    engine.expect(Act([end]), Act([end]))
    turns = [ChatMessage(role="system", content="x"), ChatMessage(role="user", content="y")]
    assert client.chat("hello").answer().choices[0].reasoning == "hm"
    assert client.chat(turns, model="m").answer().text == "hi"
    first, second = engine.requests
    assert not isinstance(first, GenerateRequest)
    assert not isinstance(second, GenerateRequest)
    assert list(first.messages) == [ChatMessage(role="user", content="hello")]
    assert list(second.messages) == turns
    assert second.model == "m"


def test_a_request_of_ones_own_is_not_changed(engine: FakeEngine, client: Client) -> None:
    own = GenerateRequest(text="x", priority=3)
    engine.expect(Act(told("ok")))
    client.generate(own).answer()
    assert own == GenerateRequest(text="x", priority=3)
    (request,) = engine.requests
    assert request.priority == 3
    assert request.sampling_params.HasField("seed")
    with pytest.raises(ValueError, match="params"):
        client.generate(own, SamplingParams())


@pytest.mark.parametrize("refusal", [BUSY, DOWN], ids=["busy", "down"])
def test_a_refused_request_is_sent_again(
    engine: FakeEngine, client: Client, refusal: engine_errors.RequestError
) -> None:
    engine.expect(Act(error=refusal), Act(error=refusal), Act(told("hello")))
    assert client.generate("x").answer().text == "hello"
    assert len(engine.requests) == 3
    assert len({request.sampling_params.seed for request in engine.requests}) == 1


def test_retries_end(engine: FakeEngine, client: Client) -> None:
    engine.expect(*[Act(error=BUSY)] * 3)
    with pytest.raises(QueueFull) as caught:
        client.generate("x").answer()
    assert caught.value.retry_after == 0.001
    assert len(engine.requests) == 3


def test_what_the_caller_must_change_is_not_sent_again(engine: FakeEngine, client: Client) -> None:
    engine.expect(Act(error=engine_errors.InvalidRequest("text", "is empty")))
    with pytest.raises(InvalidRequest) as caught:
        client.generate("").answer()
    assert caught.value.field == "text"


def test_the_engines_word_is_waited_for(engine: FakeEngine, client: Client) -> None:
    patient = engine_errors.QueueFull("full", retry_after_ms=300)
    engine.expect(Act(error=patient), Act(told("ok")))
    began = time.monotonic()
    client.generate("x").answer()
    assert time.monotonic() - began >= 0.3


def test_a_wait_beyond_the_deadline_is_not_begun(engine: FakeEngine, client: Client) -> None:
    engine.expect(Act(error=engine_errors.QueueFull("full", retry_after_ms=9000)))
    with pytest.raises(QueueFull):
        client.generate("x", timeout=5).answer()


def test_a_broken_stream_goes_on(engine: FakeEngine, client: Client) -> None:
    """Each time it brings something new it has all its attempts again."""
    text = "a long answer"
    engine.expect(
        Act(told(text, 4, end=False)[:1], bare=grpc.StatusCode.UNAVAILABLE),
        Act(error=BUSY),
        Act(told(text, 2, 6, end=False)[:2], bare=grpc.StatusCode.UNAVAILABLE),
        Act(bare=grpc.StatusCode.UNAVAILABLE),
        Act(told(text, 1, 7, 9)),
    )
    pieces = [piece.text for piece in client.generate("x")]
    assert pieces == [text[:4], text[4:6], text[6:7], text[7:9], text[9:]]


def test_a_different_answer_is_never_silent(engine: FakeEngine, client: Client) -> None:
    engine.expect(
        Act(told("abc", end=False), bare=grpc.StatusCode.UNAVAILABLE),
        Act(told("abXdef", 3)),
    )
    stream = client.generate("x")
    assert next(stream).text == "abc"
    with pytest.raises(ResumeMismatch, match="item 2 was 'c', told again it is 'X'"):
        next(stream)
    assert list(stream) == []


def test_a_given_seed_is_kept(engine: FakeEngine, client: Client) -> None:
    engine.expect(Act(told("abc", end=False), error=DOWN), Act(told("abcd")))
    client.generate("x", SamplingParams(seed=7)).answer()
    assert [request.sampling_params.seed for request in engine.requests] == [7, 7]


def test_without_resume_a_broken_stream_ends(engine: FakeEngine) -> None:
    engine.expect(Act(error=DOWN), Act(told("abc", end=False), bare=grpc.StatusCode.UNAVAILABLE))
    options = ClientOptions(timeout=60, retry=QUICK, resume=False)
    with Client(engine.address, options) as client:
        stream = client.generate("x")
        assert next(stream).text == "abc"  # the refusal before anything came was tried again
        with pytest.raises(Unavailable):
            next(stream)
    assert not any(request.sampling_params.HasField("seed") for request in engine.requests)


def test_a_stream_that_ends_early_is_a_broken_one(engine: FakeEngine, client: Client) -> None:
    engine.expect(Act(told("ab", end=False)), Act(told("abc")))
    assert client.generate("x").answer().text == "abc"


def test_time_outs_of_the_request_count_on(engine: FakeEngine, client: Client) -> None:
    hold = threading.Event()
    engine.expect(Act(told("a", end=False), error=DOWN, hold=hold), Act(told("ab")))
    stream = client.generate(GenerateRequest(text="x", timeout_ms=15_000))
    next(stream)
    time.sleep(0.05)
    hold.set()
    list(stream)
    first, second = (request.timeout_ms for request in engine.requests)
    assert first - second >= 50


def test_leaving_a_stream_cancels_it(engine: FakeEngine, client: Client) -> None:
    hold = threading.Event()
    engine.expect(Act(told("abc", end=False), hold=hold))
    with client.generate("x") as stream:
        assert next(stream).text == "abc"
    assert engine.cancelled.wait(30)
    with pytest.raises(Cancelled):
        next(stream)
    hold.set()


def test_a_stream_that_nobody_holds_is_cancelled(engine: FakeEngine, client: Client) -> None:
    hold = threading.Event()
    engine.expect(Act(told("abc", end=False), hold=hold))
    for _ in client.generate("x"):
        break
    assert engine.cancelled.wait(30)
    hold.set()


def test_cancel_from_another_thread(engine: FakeEngine, client: Client) -> None:
    hold = threading.Event()
    engine.expect(Act(told("abc", end=False), hold=hold))
    stream = client.generate("x")
    next(stream)
    threading.Timer(0.05, stream.cancel).start()
    with pytest.raises(Cancelled):
        next(stream)
    hold.set()


def test_cancel_ends_a_wait_too(engine: FakeEngine) -> None:
    engine.expect(Act(error=engine_errors.Unavailable("down", retry_after_ms=20_000)))
    with Client(engine.address) as client:
        stream = client.generate("x")
        threading.Timer(0.2, stream.cancel).start()
        began = time.monotonic()
        with pytest.raises(Cancelled):
            next(stream)
        assert time.monotonic() - began < 15


def test_a_deadline(engine: FakeEngine, client: Client) -> None:
    hold = threading.Event()
    engine.expect(Act(told("abc", end=False), hold=hold))
    stream = client.generate("x", timeout=1.5)
    assert next(stream).text == "abc"
    with pytest.raises(DeadlineExceeded):
        next(stream)
    hold.set()


def test_nothing_listens() -> None:
    options = ClientOptions(retry=RetryPolicy(attempts=2, first_wait=0.001))
    with Client("127.0.0.1:1", options) as client, pytest.raises(Unavailable):
        client.generate("x").answer()


def test_unary_calls_and_their_retries(engine: FakeEngine, client: Client) -> None:
    engine.expect(Act(error=DOWN), Act(bare=grpc.StatusCode.UNAVAILABLE), Act())
    assert client.tokenize("hi") == [104, 105]
    assert client.detokenize([104, 105]) == "hi"
    assert [model.name for model in client.models()] == ["fake"]
    engine.expect(*[Act(error=DOWN)] * 3)
    with pytest.raises(Unavailable):
        client.tokenize("hi")


def test_closing_the_client_ends_what_runs(engine: FakeEngine) -> None:
    hold = threading.Event()
    engine.expect(Act(told("abc", end=False), hold=hold))
    client = Client(engine.address)
    stream = client.generate("x")
    next(stream)
    client.close()
    with pytest.raises(Cancelled):
        next(stream)
    hold.set()


def test_tls_and_the_name_that_is_asked_for(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    name = "engine.example"
    make = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
        "-nodes", "-days", "2", "-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}",
        "-keyout", str(key), "-out", str(certificate),
    ]  # fmt: skip
    subprocess.run(make, check=True, capture_output=True)
    pair = [(key.read_bytes(), certificate.read_bytes())]
    trusted = grpc.ssl_channel_credentials(certificate.read_bytes())
    with fake_engine(grpc.ssl_server_credentials(pair)) as engine:
        engine.expect(Act(told("ok")))
        named = ClientOptions(timeout=60, retry=QUICK, credentials=trusted, authority=name)
        with Client(engine.address, named) as client:
            assert client.generate("x").answer().text == "ok"
        for options in (
            ClientOptions(timeout=60, retry=QUICK, credentials=trusted),  # of another name
            ClientOptions(timeout=60, retry=QUICK),
        ):
            with Client(engine.address, options) as client, pytest.raises(Unavailable):
                client.generate("x").answer()


def test_metadata_goes_with_every_call(engine: FakeEngine) -> None:
    engine.expect(Act(told("ok")))
    options = ClientOptions(timeout=60, metadata=(("authorization", "Bearer x"),))
    with Client(engine.address, options) as client:
        client.generate("x").answer()
    assert engine.metadata[0]["authorization"] == "Bearer x"
