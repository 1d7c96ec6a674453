"""Sizes, labels and oversized inputs at real engines (R70, R71, R76): each is answered for itself,
while a neighbour streams on."""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import grpc
import httpx
import pytest

from engine import Engine, generate_request
from grpc_errors import refused, violations
from leaving import GrpcCall, HttpCall, Leaving, SessionCall, Wanted, unharmed_engine
from raw_http import RawHttp, request_bytes
from small_engines import tiny_model
from triptych.v1 import common_pb2, inference_pb2

pytestmark = pytest.mark.faults

INVALID = grpc.StatusCode.INVALID_ARGUMENT
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
LIMIT = 16 << 20
"""max_message_bytes and http_max_body_bytes, as documented."""
CLIENT_LIMIT = 4 << 20
"""What gRPC's clients take of one message unless they say otherwise."""
SOON = 30.0
"""Seconds that an answer may take on a machine that does much else."""
CONTEXT = 4096
NEIGHBOUR = Wanted(prompt=(7, 8, 9), max_tokens=3000)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("sizes")
    model = tiny_model(folder, max_position_embeddings=CONTEXT)
    flags = ("--kv-cache-memory", "16MiB", "--cpu-threads", "1", "--max-logprobs", "100",
             "--max-num-batched-tokens", str(CONTEXT), "--max-num-seqs", "64")  # fmt: skip
    with unharmed_engine(model, folder / "run", *flags) as engine:
        yield engine


@pytest.fixture(scope="module")
def reference(engine: Engine) -> list[int]:
    return whole(GrpcCall(engine, NEIGHBOUR))


def whole(call: Leaving) -> list[int]:
    while call.read():
        pass
    return call.ids


@contextmanager
def neighbour(engine: Engine, reference: list[int]) -> Iterator[None]:
    """One that streams all the time meanwhile, again and again, and is not disturbed."""
    stop = threading.Event()
    wrong: list[list[int]] = []

    def stream() -> None:
        while not stop.is_set():
            call = GrpcCall(engine, NEIGHBOUR)
            while call.read() and not stop.is_set():
                pass
            if call.ids != reference[: len(call.ids)] or call.code is not grpc.StatusCode.OK:
                wrong.append(call.ids)
                return
            call.leave()

    thread = threading.Thread(target=stream)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)
    assert not wrong


@contextmanager
def memory_stays(engine: Engine, most: int) -> Iterator[None]:
    """The tokenizer process does not grow by more bytes."""
    before = engine.stats("tokenizer-0").process.resident_bytes
    yield
    assert engine.stats("tokenizer-0").process.resident_bytes - before < most


def post(engine: Engine, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"http://{engine.http_address}{path}", json=body, timeout=60)


# -------------------------------------------------------------------------------------------- R70


def test_r70_a_prompt_of_5_mb_is_refused_for_its_length(
    engine: Engine, reference: list[int]
) -> None:
    with neighbour(engine, reference), memory_stays(engine, 200 << 20):
        ids = generate_request([9] * (5 << 20), max_tokens=1)
        for call in (
            lambda: list(engine.stub.Generate(ids, timeout=SOON)),
            lambda: list(engine.stub.Generate(generate_request("x" * (5 << 20)), timeout=SOON)),
        ):
            error = refused(call)
            assert error.code() is INVALID
            assert str(CONTEXT) in error.details()
        answer = post(engine, "/v1/completions", {"prompt": "x" * (5 << 20)})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_r70_one_byte_above_the_limit(engine: Engine, reference: list[int]) -> None:
    """The limit itself is read, and refused for what is in it."""
    request = generate_request("")
    request.text = "x" * (LIMIT - generate_request("x" * LIMIT).ByteSize() + LIMIT)
    assert request.ByteSize() == LIMIT
    body = b'{"prompt":"%s"}' % (b"x" * (LIMIT - 13))
    assert len(body) == LIMIT
    with neighbour(engine, reference), memory_stays(engine, 200 << 20):
        asked = partial(engine.stub.Generate, timeout=SOON)
        assert refused(lambda: list(asked(request))).code() is INVALID
        request.text += "x"
        assert refused(lambda: list(asked(request))).code() is EXHAUSTED
        request.text *= 4
        assert refused(lambda: list(asked(request))).code() is EXHAUSTED
        for sent, status in ((body, 400), (body + b" ", 413)):
            http = RawHttp(engine)
            http.send(request_bytes("/v1/completions", sent))
            assert http.answer()[0] == status
            http.fin()
        http = RawHttp(engine)
        http.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                  b"content-length: %d\r\n\r\n" % (2 << 30))  # fmt: skip
        assert http.answer()[0] == 413  # before any of it has come
        http.fin()
    engine.wait_idle()


def test_r70_answers_above_what_a_client_takes_at_once(
    engine: Engine, reference: list[int]
) -> None:
    """Made in one step, through both hops, in parts that any client takes."""
    prompt = [(7 * k) % 256 for k in range(CONTEXT - 8)]
    params: dict[str, Any] = {"prompt_logprobs": 70, "max_tokens": 2, "temperature": 0.0}
    sizes: list[int] = []
    rows: list[common_pb2.TokenLogprob] = []
    with neighbour(engine, reference), memory_stays(engine, 500 << 20):
        for response in engine.stub.Generate(generate_request(prompt, **params), timeout=60):
            sizes.append(response.ByteSize())
            rows += response.prompt_logprobs
        assert sum(sizes) > CLIENT_LIMIT
        assert max(sizes) < CLIENT_LIMIT // 2
        assert [row.token_id for row in rows] == prompt
        start = inference_pb2.SessionStart(id=1, generate=generate_request(prompt, **params))
        session = engine.stub.Session(iter([inference_pb2.SessionRequest(start=start)]), timeout=60)
        again = [row for response in session for event in response.events
                 for row in event.output.prompt_logprobs]  # fmt: skip
        assert len(again) == len(rows)
        assert again[::500] == rows[::500]
        answer = post(engine, "/v1/completions", {"prompt": prompt, **params})
        assert len(answer.content) > 2 * CLIENT_LIMIT
        over_http = answer.json()["choices"][0]["prompt_logprobs"]
        assert len(over_http) == len(prompt)
        for row, told in list(zip(rows, over_http, strict=True))[1::500]:
            assert told[str(row.token_id)]["logprob"] == pytest.approx(row.logprob, abs=1e-5)
    engine.wait_idle()


# -------------------------------------------------------------------------------------------- R71


def labelled(wanted: Wanted, label: str) -> inference_pb2.GenerateRequest:
    request = wanted.over_grpc()
    request.request_id = label
    return request


def test_r71_a_hundred_pairs_of_one_label(engine: Engine) -> None:
    """Each answer is its own client's, by whatever door; one of a pair that is aborted stops
    nothing of the other; a label is used again at once."""
    wanted = [Wanted(prompt=(k, 2 * k, 5), max_tokens=8) for k in range(1, 101)]
    others = [Wanted(prompt=(k, 5), max_tokens=8) for k in range(1, 101)]
    expected = [whole(GrpcCall(engine, each)) for each in (*wanted, *others)]
    assert len({tuple(each) for each in expected}) > 150

    def over_grpc(each: Wanted, label: str) -> list[int]:
        answer = engine.stub.Generate(labelled(each, label), timeout=60)
        return [token for response in answer for token in response.token_ids]

    def over_http(each: Wanted, label: str) -> list[int]:
        http = RawHttp(engine)
        headers = {"X-Request-Id": label}
        http.send(request_bytes("/v1/completions", each.over_http(stream=False), headers))
        status, answer = http.answer()
        http.fin()
        assert status == 200
        return list(answer["choices"][0]["token_ids"])

    def aborted(label: str) -> None:
        call = engine.stub.Generate(labelled(Wanted(max_tokens=1000), label), timeout=60)
        next(call)
        call.cancel()

    with ThreadPoolExecutor(12) as pool:
        jobs = []
        for k in range(100):
            label = f"pair-{k}"
            jobs.append(pool.submit(over_grpc, wanted[k], label))
            pool.submit(aborted, label)
            jobs.append(pool.submit(over_http if k % 2 else over_grpc, others[k], label))
        got = [job.result() for job in jobs]
    assert got[::2] + got[1::2] == expected
    for _ in range(3):
        aborted("again")
        assert over_grpc(wanted[0], "again") == over_http(wanted[0], "again") == expected[0]
    engine.wait_idle()


def test_r71_a_session_has_each_id_once_at_a_time(engine: Engine) -> None:
    with engine.frozen():  # so that the first one does not end before the others come
        session = SessionCall(engine, Wanted(max_tokens=200), by_id=True)
        for _ in range(5):
            start = inference_pb2.SessionStart(id=1, generate=Wanted(prompt=(5,)).over_grpc())
            session.actions.put(inference_pb2.SessionRequest(start=start))
        while len(session.errors) < 5:
            assert session.read()
    session.actions.put(None)
    assert whole(session) == whole(GrpcCall(engine, Wanted(max_tokens=200)))
    assert session.ends == [common_pb2.FINISH_REASON_LENGTH]
    assert session.errors == [grpc.StatusCode.ALREADY_EXISTS.value[0]] * 5
    engine.wait_idle()


# -------------------------------------------------------------------------------------------- R76

OVERSIZED: list[tuple[str, dict[str, Any]]] = [
    ("stop", {"stop": ["a"] * 500_000}), ("bad_words", {"bad_words": ["b"] * 50_000}),
    ("n", {"n": 10**9}), ("best_of", {"best_of": 10**6}), ("logprobs", {"logprobs": 10**6}),
    ("prompt_logprobs", {"prompt_logprobs": 10**6}),
    ("logit_bias", {"logit_bias": dict.fromkeys(range(10**6), 1.0)}),
    ("stop_token_ids", {"stop_token_ids": [1] * 10**6}),
    ("bad_words_token_ids", {"bad_words_token_ids": [common_pb2.TokenIds(ids=[1])] * 50_000}),
    ("structured_output", {"structured_output": common_pb2.StructuredOutput(
        regex="x" * (4 << 20))}),
    ("logits_processors", {"logits_processors": [common_pb2.LogitsProcessor(name="x")] * 10**5}),
]  # fmt: skip


def test_r76_over_grpc(engine: Engine, reference: list[int]) -> None:
    message = inference_pb2.ChatMessage(role="user", content="a")
    tool = inference_pb2.Tool(name="t")
    named: list[tuple[str, Callable[[], object]]] = [
        (field, partial(_generate, engine, generate_request([1], max_tokens=2, **params)))
        for field, params in OVERSIZED
    ]
    for field in ("request_id", "cache_salt", "tenant", "model"):
        request = generate_request([1], max_tokens=2)
        setattr(request, field, "x" * 10**6)
        named.append((field, partial(_generate, engine, request)))
    for field, chat in (
        ("messages", inference_pb2.ChatRequest(messages=[message] * 10**5)),
        ("tools", inference_pb2.ChatRequest(messages=[message], tools=[tool] * 10**5)),
    ):
        named.append((field, partial(_chat, engine, chat)))
    with neighbour(engine, reference), memory_stays(engine, 200 << 20):
        for field, call in named:
            error = refused(call)
            if field == "model":
                assert error.code() is grpc.StatusCode.NOT_FOUND
            else:
                assert error.code() is INVALID, (field, error.details()[:200])
                assert any(field in name for name in violations(error)), violations(error)
            assert len(error.details()) < 2048
        many = tuple((f"x-{k}", "y") for k in range(10_000))
        for metadata in ((("x-long", "y" * (1 << 20)),), many):
            request = generate_request([1], max_tokens=2)
            answer = engine.stub.Generate(request, metadata=metadata, timeout=SOON)
            assert refused(partial(list, answer)).code() is EXHAUSTED
    assert _generate(engine, generate_request([1], max_tokens=2))
    engine.wait_idle()


def _generate(engine: Engine, request: inference_pb2.GenerateRequest) -> object:
    return list(engine.stub.Generate(request, timeout=SOON))


def _chat(engine: Engine, request: inference_pb2.ChatRequest) -> object:
    return list(engine.stub.Chat(request, timeout=SOON))


def test_r76_over_http(engine: Engine, reference: list[int]) -> None:
    """What tests/integration/test_http_door.py has not: heads, and bodies that only say their
    size."""
    small = json.dumps({"prompt": [1], "max_tokens": 2}).encode()
    with neighbour(engine, reference), memory_stays(engine, 200 << 20):
        for headers in (
            {"X-Long": "x" * (1 << 20)}, {f"X-{k}": "y" for k in range(10_000)},
            {"X-Request-Id": "x" * (1 << 20)}, {"Authorization": "Bearer " + "x" * (1 << 18)},
        ):  # fmt: skip
            assert _status(engine, request_bytes("/v1/completions", small, headers)) == 431
        label = {"X-Request-Id": "x" * 50_000}  # cut to what a label may have
        assert _status(engine, request_bytes("/v1/completions", small, label)) == 200
        line = b"GET /" + b"x" * (1 << 20) + b" HTTP/1.1\r\nhost: x\r\n\r\n"
        assert _status(engine, line) == 431
        chunked = (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\n7fffffff\r\n" + b"x" * (LIMIT + 1)
        )
        assert _status(engine, chunked) == 413
        for path, body in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 10**5}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}],
                                      "logprobs": True, "top_logprobs": 10**6}),
            ("/v1/completions", {"prompt": ["x"] * 10**6}),
            ("/v1/completions", {"prompt": "x", "user": "u" * (10 << 20)}),
        ):  # fmt: skip
            answer = post(engine, path, body)
            assert answer.status_code == 400, answer.text[:200]
            assert len(answer.content) < 2048
    call = HttpCall(engine, Wanted(max_tokens=20), "fin", stream=True)
    assert len(whole(call)) == 20
    call.leave()
    engine.wait_idle()


def _status(engine: Engine, data: bytes) -> int:
    """Of the answer, which may come before all has been sent."""
    http = RawHttp(engine, timeout=SOON)
    with suppress(BrokenPipeError, ConnectionResetError):  # it has heard enough
        http.send(data)
    try:
        http.read_until(b"\r\n\r\n")
    except ConnectionResetError:
        return 0
    finally:
        http.fin()
    return int(http.received.split()[1])
