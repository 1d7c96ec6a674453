"""One request by any door, from a client that may leave it in any way."""

import queue
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import grpc
import httpx

from engine import Engine, generate_request, running_engine
from grpc_errors import as_error
from raw_http import RawHttp, request_bytes
from triptych.v1 import common_pb2, control_pb2, inference_pb2


@dataclass(frozen=True)
class Wanted:
    """A greedy request. `params`: SamplingParams that are called the same over HTTP."""

    prompt: tuple[int, ...] = (1, 2, 3)
    max_tokens: int = 3000
    params: dict[str, Any] = field(default_factory=dict)
    schema: str = ""

    def over_grpc(self) -> inference_pb2.GenerateRequest:
        params: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, **self.params}
        if self.schema:
            params["structured_output"] = common_pb2.StructuredOutput(json_schema=self.schema)
        return generate_request(self.prompt, max_tokens=self.max_tokens, **params)

    def over_http(self, *, stream: bool) -> dict[str, Any]:
        body: dict[str, Any] = {
            "prompt": list(self.prompt), "max_tokens": self.max_tokens, "temperature": 0.0,
            "ignore_eos": True, "stream": stream, "return_token_ids": True, **self.params,
        }  # fmt: skip
        return body | ({"guided_json": self.schema} if self.schema else {})


class Leaving(Protocol):
    """A request that was sent. `ids`: what its client has read of it."""

    streams: bool

    @property
    def ids(self) -> list[int]: ...

    def read(self) -> bool:
        """Wait for more; False at the end."""

    def leave(self) -> None:
        """Be gone, in this client's own way."""


class GrpcCall:
    """Generate, cancelled."""

    streams = True

    def __init__(self, engine: Engine, wanted: Wanted, timeout: float | None = 60) -> None:
        self._call = engine.stub.Generate(wanted.over_grpc(), timeout=timeout)
        self.ids: list[int] = []
        self.code = grpc.StatusCode.OK

    def read(self) -> bool:
        try:
            self.ids += next(self._call).token_ids
        except StopIteration:
            return False
        except grpc.RpcError as error:
            self.code = as_error(error).code()
            return False
        return True

    def leave(self) -> None:
        self._call.cancel()


class SessionCall:
    """A request of a session of its own, which is cancelled by id, or whose stream is."""

    streams = True

    def __init__(self, engine: Engine, wanted: Wanted, *, by_id: bool) -> None:
        self._by_id = by_id
        self.actions: queue.Queue[inference_pb2.SessionRequest | None] = queue.Queue()
        start = inference_pb2.SessionStart(id=1, generate=wanted.over_grpc())
        self.actions.put(inference_pb2.SessionRequest(start=start))
        actions: Iterator[inference_pb2.SessionRequest] = iter(self.actions.get, None)
        self._call = engine.stub.Session(actions, timeout=60)
        self.ids: list[int] = []
        self.ends: list[int] = []
        self.errors: list[int] = []

    def read(self) -> bool:
        try:
            response = next(self._call)
        except (StopIteration, grpc.RpcError):
            return False
        for event in response.events:
            self.ids += event.output.token_ids
            if event.output.finish_reason:
                self.ends.append(event.output.finish_reason)
            if event.HasField("error"):
                self.errors.append(event.error.code)
        return True

    def leave(self) -> None:
        if self._by_id:
            cancel = inference_pb2.SessionCancel(id=1)
            self.actions.put(inference_pb2.SessionRequest(cancel=cancel))
            self.actions.put(None)
            return
        self._call.cancel()
        self.actions.put(None)  # for the thread that sends


class HttpCall:
    """A completion, streamed or not, of a client that closes its socket somehow."""

    def __init__(self, engine: Engine, wanted: Wanted, way: str, *, stream: bool) -> None:
        self.streams = stream
        self.http = RawHttp(engine)
        self.http.send(request_bytes("/v1/completions", wanted.over_http(stream=stream)))
        self._way = way

    @property
    def ids(self) -> list[int]:
        return self.http.token_ids()

    def read(self) -> bool:
        count = len(self.http.events())
        while len(events := self.http.events()) == count:
            if events[-1:] == [{}] or not self.http.read():
                return False
        return True

    def leave(self) -> None:
        getattr(self.http, self._way)()
        if self._way == "half_close":
            while self.http.read():  # it is taken as gone: what was on its way, then the end
                pass
            self.http.fin()


Open = Callable[[Engine, Wanted], Leaving]


def _http(way: str, *, stream: bool) -> Open:
    return lambda engine, wanted: HttpCall(engine, wanted, way, stream=stream)


WAYS: dict[str, Open] = {
    "grpc-cancel": GrpcCall,
    "session-by-id": lambda engine, wanted: SessionCall(engine, wanted, by_id=True),
    "session-gone": lambda engine, wanted: SessionCall(engine, wanted, by_id=False),
    "http-stream-fin": _http("fin", stream=True),
    "http-stream-rst": _http("rst", stream=True),
    "http-stream-half-close": _http("half_close", stream=True),
    "http-whole-fin": _http("fin", stream=False),
    "http-whole-rst": _http("rst", stream=False),
    "http-whole-half-close": _http("half_close", stream=False),
}


def figures(engine: Engine) -> control_pb2.SchedulerStats:
    return engine.stats("scheduler").scheduler


def until(condition: Callable[[], object], timeout: float = 30.0) -> None:
    """Ask again and again until it is true."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.002)


@contextmanager
def unharmed_engine(model: Path, run_dir: Path, *flags: str) -> Iterator[Engine]:
    """An engine that serves over HTTP too, has given back everything at the end, and has logged no
    error."""
    with running_engine(model, run_dir, *flags) as engine:
        until(lambda: httpx.get(f"http://{engine.http_address}/health").status_code == 200)
        yield engine
        engine.wait_idle()
    assert " ERROR " not in engine.log.read_text()


def ends_within_a_step(engine: Engine, aborted: int, choices: int = 1) -> None:
    """Assert that the scheduler hears that somebody left, and draws at most what was in flight.

    `aborted`: its requests_aborted_total from before. Nothing else may run.
    """
    seen = control_pb2.SchedulerStats()

    def heard() -> bool:
        seen.CopyFrom(figures(engine))
        return seen.requests_aborted_total > aborted

    until(heard)
    after = engine.wait_idle()
    assert after.generated_tokens_total - seen.generated_tokens_total <= choices
    assert after.steps_total - seen.steps_total <= 1
