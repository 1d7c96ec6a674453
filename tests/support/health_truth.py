"""Asks for a token whenever health says that there are some."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine import RECONNECT_SOON, Engine, generate_request
from fault_asks import Door

_SERVICE = "triptych.v1.InferenceService"
_SERVING = health_pb2.HealthCheckResponse.SERVING
_LATEST = 30.0
"""Seconds; a bound for waits, not a claim."""


@dataclass(frozen=True)
class Probe:
    """Health said SERVING at `asked`; whether a token came, or what else."""

    asked: float
    answered: float
    failure: str


@dataclass
class HealthTruth:
    """What health has said, by each of its mouths, and what it was worth. Times: monotonic."""

    engine: Engine
    door: Door
    said: dict[str, list[tuple[float, bool]]] = field(default_factory=dict)
    """By mouth: every change, with its time."""
    probes: list[Probe] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _cancel_watch: Callable[[], object] = lambda: None

    def now(self) -> dict[str, bool]:
        """The last word of each mouth."""
        return {mouth: said[-1][1] for mouth, said in list(self.said.items())}

    def lies(self, deaths: list[tuple[float, float]]) -> list[Probe]:
        """Probes that failed, but for those that ran between a death and everybody's knowing it."""
        return [
            probe for probe in self.probes
            if probe.failure
            and not any(probe.asked < known and gone < probe.answered for gone, known in deaths)
        ]  # fmt: skip

    @contextmanager
    def watching(self) -> Iterator["HealthTruth"]:
        asking = [self._ask_check, self._ask_watch, self._ask_http, self._probe]
        threads = [threading.Thread(target=self._loop, args=(each,)) for each in asking]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            self._cancel_watch()
            for thread in threads:
                thread.join(2 * _LATEST)
        assert not any(thread.is_alive() for thread in threads)

    def _loop(self, ask: Callable[[], None]) -> None:
        while not self._stop.is_set():
            ask()
            self._stop.wait(0.01)

    def _note(self, mouth: str, serving: bool) -> None:
        said = self.said.setdefault(mouth, [])
        if not said or said[-1][1] != serving:
            said.append((time.monotonic(), serving))

    def _stub(self, channel: grpc.Channel) -> health_pb2_grpc.HealthStub:
        return health_pb2_grpc.HealthStub(channel)

    def _check(self) -> bool:
        request = health_pb2.HealthCheckRequest(service=_SERVICE)
        try:
            said = self._stub(self.door.channel).Check(request, timeout=_LATEST).status
        except grpc.RpcError:
            return False
        return bool(said == _SERVING)

    def _ask_check(self) -> None:
        self._note("Check", self._check())

    def _probe(self) -> None:
        asked = time.monotonic()
        if self._check():
            failure = ""
            try:
                if not self.engine.stats("scheduler").scheduler.executor_ready:
                    failure = "there is no executor"
                one = generate_request([7, 8, 9], max_tokens=1)
                list(self.door.stub.Generate(one, timeout=_LATEST))
            except grpc.RpcError as error:
                failure = str(error)
            self.probes.append(Probe(asked, time.monotonic(), failure))

    def _ask_watch(self) -> None:
        with grpc.insecure_channel(self.door.address, options=RECONNECT_SOON) as channel:
            watch = self._stub(channel).Watch(health_pb2.HealthCheckRequest(service=_SERVICE))
            self._cancel_watch = watch.cancel
            try:
                for each in watch:
                    self._note("Watch", each.status == _SERVING)
            except grpc.RpcError:
                if not self._stop.is_set():
                    self._note("Watch", False)

    def _ask_http(self) -> None:
        try:
            status = httpx.get(f"{self.door.url}/health", timeout=_LATEST).status_code
        except httpx.TransportError:
            status = 0
        assert status in (0, 200, 503)
        self._note("HTTP", status == 200)
