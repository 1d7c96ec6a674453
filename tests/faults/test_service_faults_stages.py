"""Streams that break in the middle (R34 b), and an engine that is still loading (R72)."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine import Engine, running_engine, stop, wait_until_serving
from grpc_errors import as_error, refused
from leaving import GrpcCall, SessionCall, Wanted, until
from raw_http import RawHttp, request_bytes
from small_engines import SMALL, tiny_model
from triptych.v1 import inference_pb2

pytestmark = pytest.mark.faults

LONG = Wanted(max_tokens=4000)
GOOD = Wanted(prompt=(9, 8), max_tokens=10)
HEARTBEAT_TIMEOUT = 6.0
SERVICE = "triptych.v1.InferenceService"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4000, "ignore_eos": True}


def slow_model(folder: Path) -> Path:
    """About a millisecond a token."""
    return tiny_model(
        folder, max_position_embeddings=8192, hidden_size=192, intermediate_size=768,
        num_hidden_layers=4,
    )  # fmt: skip


def whole(engine: Engine, wanted: Wanted) -> list[int]:
    call = GrpcCall(engine, wanted)
    while call.read():
        pass
    assert call.code is grpc.StatusCode.OK
    return call.ids


# ----------------------------------------------------------------------------------------- R34 (b)


class PackageStream(threading.Thread):
    """A stream read with the `openai` package."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._url = f"http://{engine.http_address}/v1"
        self.chunks = 0
        self.reasons: set[str | None] = set()
        self.error: openai.APIError | None = None

    def run(self) -> None:
        with openai.OpenAI(base_url=self._url, api_key="none", max_retries=0) as client:
            try:
                stream = client.completions.create(
                    model="model", prompt="hi", max_tokens=4000, stream=True,
                    extra_body={"ignore_eos": True},
                )  # fmt: skip
                for chunk in stream:
                    self.chunks += 1
                    self.reasons |= {choice.finish_reason for choice in chunk.choices}
            except openai.APIError as error:
                self.error = error


def test_r34_a_stream_that_breaks_says_so_once_and_is_never_taken_for_whole(tmp_path: Path) -> None:
    """Nobody starts the executor again within recovery_timeout: the supervisor is frozen."""
    flags = (*SMALL, "--recovery-timeout", "1")
    with running_engine(slow_model(tmp_path), tmp_path / "run", *flags) as engine:
        until(lambda: httpx.get(f"http://{engine.http_address}/health").status_code == 200)
        expected = whole(engine, GOOD)
        paths = {"/v1/completions": LONG.over_http(stream=True),
                 "/v1/chat/completions": {**CHAT, "stream": True}}  # fmt: skip
        https = [RawHttp(engine, timeout=60) for _ in paths]
        for http, (path, body) in zip(https, paths.items(), strict=True):
            http.send(request_bytes(path, body))
        unstreamed = RawHttp(engine, timeout=60)
        unstreamed.send(request_bytes("/v1/completions", LONG.over_http(stream=False)))
        package = PackageStream(engine)
        package.start()
        generated, session = GrpcCall(engine, LONG), SessionCall(engine, LONG, by_id=True)
        for http in https:
            http.read_until(b"data: ", 3)
        assert generated.read()
        assert session.read()
        until(lambda: package.chunks > 2)
        os.kill(engine.process.pid, signal.SIGSTOP)
        try:
            os.kill(engine.pid("executor-0"), signal.SIGKILL)
            for http in https:
                http.read_until(b"\r\n0\r\n\r\n")
            status, told = unstreamed.answer()
            package.join(60)
            while generated.read():
                pass
            while not session.errors:
                assert session.read()
        finally:
            os.kill(engine.process.pid, signal.SIGCONT)
        for http in https:
            *events, last = http.events()
            assert set(last) == {"error"}
            assert last["error"]["code"] == "unavailable"
            assert not [event for event in events if "error" in event]
            assert {event["choices"][0]["finish_reason"] for event in events} == {None}
            assert b"[DONE]" not in http.received
        assert (status, told["error"]["code"]) == (503, "unavailable")
        assert package.error is not None
        assert package.error.code == "unavailable"
        assert package.reasons == {None}
        assert generated.code is grpc.StatusCode.UNAVAILABLE
        assert session.errors == [grpc.StatusCode.UNAVAILABLE.value[0]]
        assert session.ends == []
        session.actions.put(None)  # itself it goes on
        assert not session.read()
        for http in (*https, unstreamed):
            http.fin()
        wait_until_serving(engine)
        assert whole(engine, GOOD) == expected
        engine.wait_idle()


# ------------------------------------------------------------------------------------------- R72


@contextmanager
def loading_engine(tmp_path: Path) -> Iterator[tuple[Engine, int]]:
    """One whose executor is frozen while it loads, and that one's pid."""
    model = tiny_model(
        tmp_path, max_position_embeddings=512, hidden_size=768, intermediate_size=3072,
        num_hidden_layers=6,
    )  # fmt: skip
    for attempt in range(5):  # a busy machine may not freeze it in time
        with started(model, tmp_path / f"run{attempt}") as engine:
            until(lambda: "loading weights" in engine.log.read_text(), timeout=60)
            until((engine.run_dir / "executor-0.control.sock").exists)
            executor = int((engine.run_dir / "executor-0.lock").read_text())
            os.kill(executor, signal.SIGSTOP)
            if re.search(r"weights [a-z ]+ in [0-9]", engine.log.read_text()) is None:
                yield engine, executor
                assert stop(engine) == 0
                return
    raise AssertionError("it had been loaded each time")


@contextmanager
def started(model: Path, run_dir: Path) -> Iterator[Engine]:
    """An engine that may still be starting."""
    run_dir.mkdir(mode=0o700)
    log = run_dir / "serve.log"
    command = [
        sys.executable, "-m", "triptych.services.cli", "serve", "--model", str(model),
        "--run-dir", str(run_dir), "--port", "0", "--http-port", "0", *SMALL,
        "--heartbeat-interval", "0.2", "--heartbeat-timeout", str(HEARTBEAT_TIMEOUT),
    ]  # fmt: skip
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT)
    engine = Engine(run_dir, process, log)
    try:
        yield engine
    finally:
        engine.close()
        if process.poll() is None:
            process.kill()
            process.wait(10)


def http_is_open(engine: Engine) -> bool:
    with suppress(grpc.RpcError):  # not up yet
        return bool(engine.http_address)
    return False


def test_r72_while_a_model_loads_nobody_says_that_it_serves_and_nobody_waits(
    tmp_path: Path,
) -> None:
    with loading_engine(tmp_path) as (engine, executor):
        until((engine.run_dir / "tokenizer-0.control.sock").exists)
        until(lambda: http_is_open(engine))
        url = f"http://{engine.http_address}"
        with grpc.insecure_channel(engine.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service=SERVICE)
            watched: list[int] = []
            watch = health.Watch(request)
            watcher = threading.Thread(target=_note, args=(watch, watched))
            watcher.start()
            for _ in range(4):
                status = health.Check(request, timeout=10).status
                assert status == health_pb2.HealthCheckResponse.NOT_SERVING
                assert httpx.get(f"{url}/health", timeout=10).status_code == 503
                error = refused(lambda: list(engine.stub.Generate(GOOD.over_grpc(), timeout=9)))
                assert error.code() is grpc.StatusCode.UNAVAILABLE
                assert "starting" in error.details()
                answer = httpx.post(
                    f"{url}/v1/completions", json=GOOD.over_http(stream=True), timeout=10
                )
                assert answer.status_code == 503
                assert int(answer.headers["retry-after"]) >= 1
                with pytest.raises(grpc.RpcError) as caught:
                    engine.stub.Tokenize(inference_pb2.TokenizeRequest(text="a"), timeout=9)
                assert as_error(caught.value).code() is grpc.StatusCode.UNAVAILABLE
                # Longer in all: loading is no hang before it takes three times as long.
                time.sleep(1.1 * HEARTBEAT_TIMEOUT / 4)
            os.kill(executor, signal.SIGCONT)
            until(lambda: watched[-1] == health_pb2.HealthCheckResponse.SERVING, timeout=60)
            assert len(whole(engine, GOOD)) == GOOD.max_tokens
            assert httpx.get(f"{url}/health", timeout=10).status_code == 200
            assert watched == [
                health_pb2.HealthCheckResponse.NOT_SERVING,
                health_pb2.HealthCheckResponse.SERVING,
            ]
            watch.cancel()
            watcher.join(10)
        engine.wait_idle()


def _note(watch: Iterator[health_pb2.HealthCheckResponse], said: list[int]) -> None:
    with suppress(grpc.RpcError):  # in the end it is cancelled
        for each in watch:
            said.append(each.status)
