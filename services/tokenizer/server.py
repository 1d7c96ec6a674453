"""The public gRPC server, and the tokenizer process as one object that tests can start too."""

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

import triptych
from triptych.services.runtime.control_server import CallRefused, ControlCalls, ControlServer
from triptych.services.runtime.health import Health
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.runtime.ports import check_port
from triptych.services.runtime.process_stats import process_stats
from triptych.services.runtime.reflection import add_reflection
from triptych.services.runtime.run_dir import RunDir
from triptych.services.runtime.stage_states import trouble
from triptych.services.tokenizer.admission import Admission
from triptych.services.tokenizer.calling import parsers_of
from triptych.services.tokenizer.generation import Generation, GenerationRules
from triptych.services.tokenizer.grammar_checker import GrammarChecker
from triptych.services.tokenizer.grammar_process import CheckLimits
from triptych.services.tokenizer.http_port import HttpPort
from triptych.services.tokenizer.interop.engine import Engine
from triptych.services.tokenizer.interop.other_services import KSERVE, VLLM, Doors
from triptych.services.tokenizer.outage import Outage
from triptych.services.tokenizer.scheduler_client import SchedulerClient
from triptych.services.tokenizer.scheduler_connection import Beats, SchedulerConnection
from triptych.services.tokenizer.scheduler_control import SchedulerControl
from triptych.services.tokenizer.servicer import INFERENCE_SERVICE, InferenceServicer
from triptych.services.tokenizer.settings import TokenizerSettings
from triptych.services.tokenizer.stats import Counters
from triptych.services.tokenizer.structured import StructuredOutputs
from triptych.services.tokenizer.tokenizer import Tokenizer
from triptych.services.tokenizer.unread_watch import UnreadWatch
from triptych.v1 import control_pb2, inference_pb2_grpc, stage_pb2

if TYPE_CHECKING:
    from triptych.services.tokenizer.openai_http.door import Door

_STOP_GRACE = 0.5  # for what is still open after the drain: watchers, sessions without requests
# On one connection, beyond max_streams. HTTP/2 resets a stream above its limit without a reason,
# and a client learns of the limit only after its first requests: a burst must reach the admission,
# which refuses with a retry hint.
_MORE_STREAMS = 1 << 16
_MORE_CONNECTIONS = 1024  # over HTTP, beyond max_streams: pooled, asking for health

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What the process knows of the model before it talks to anybody."""

    tokenizer: Tokenizer
    fingerprint: str
    names: tuple[str, ...]
    path: Path | None = None
    """Of a file or a folder."""


class TokenizerService:
    """Public server, control server and scheduler connection of one tokenizer process.

    The caller holds `run_dir.lock(settings.name)`. Everything runs on one event loop.
    """

    def __init__(self, settings: TokenizerSettings, run_dir: RunDir, model: LoadedModel) -> None:
        self._settings = settings
        self._model = model
        self._counters = Counters()
        self._admission = Admission(settings.max_streams, settings.max_prompt_bytes)
        others = [VLLM] if settings.vllm_grpc else []
        others += [KSERVE] if settings.kserve_grpc else []
        self._health = Health((INFERENCE_SERVICE, *(name for name, _ in others)))
        self._others = tuple(others)
        calls = ControlCalls(drain=self._drain, resume=self._resume)
        self._control = ControlServer(run_dir, settings.name, self.stats, calls)
        self._draining = self._stopping = False
        self.address = ""
        """host:port as clients reach it; set by `start`."""
        hello = stage_pb2.TokenizerHello(
            fingerprint=model.fingerprint, vocabulary_size=model.tokenizer.vocabulary_size
        )
        limits = CheckLimits(
            settings.structured_output_check_seconds, settings.structured_output_check_memory
        )
        parsers = parsers_of(
            settings.tool_call_parser,
            settings.reasoning_parser,
            model.tokenizer.chat_template_source,
        )
        self._structured = StructuredOutputs(
            model.tokenizer,
            GrammarChecker(limits),
            model.tokenizer.special_ids(parsers.markers),
        )
        beats = Beats(settings.heartbeat_interval, settings.heartbeat_timeout)
        self.client = SchedulerClient(
            SchedulerConnection(run_dir.scheduler_endpoint, hello, beats),
            self._counters,
            self._readiness_changed,
            self._structured.vocabulary,
            Outage(settings.recovery_timeout, partial(trouble, run_dir)),
        )
        self._generation = Generation(
            model.tokenizer,
            model.names,
            self.client,
            self._structured,
            self._counters,
            GenerationRules(
                seed=settings.seed,
                max_unread_tokens=settings.max_unread_tokens,
                max_logprobs=settings.max_logprobs,
                parsers=parsers,
                hide_uncallable_tools=settings.exclude_tools_when_tool_choice_none,
            ),
        )
        self._scheduler_control = SchedulerControl(run_dir)
        self._server = self._public_server()
        self._http = HttpPort(self._door, triptych.__version__, self._http_failed)

    async def start(self) -> None:
        """Bind, serve, and connect. NOT_SERVING until the engine is ready. Raises StartupError."""
        host, port = self._settings.host, self._settings.port
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if not self._settings.reuse_port:
            check_port(host, port)
        if self._settings.http:
            self._http.bind(
                self._settings.http_host,
                self._settings.http_port,
                shared=self._settings.reuse_port,
                unread_timeout=self._settings.unread_timeout,
            )
        try:
            bound = self._server.add_insecure_port(target)
        except RuntimeError as error:
            raise StartupError(f"port {target} cannot be bound; is it in use?") from error
        self.address = f"{target.rpartition(':')[0]}:{bound}"
        await self._control.start()
        await self._server.start()
        self.client.start()
        self._http.open_soon()
        _log.info("listening", extra={"address": self.address})

    async def stop(self, grace: float) -> None:
        """Refuse new requests, let the open ones finish for `grace` seconds, then close."""
        self._stopping = True
        self._admission.close("this process is shutting down")
        self._readiness_changed()
        self._health.close()
        if not await self._admission.idle(grace):
            _log.warning("requests cut off", extra={"requests": self._admission.running})
        await asyncio.gather(self._server.stop(_STOP_GRACE), self._http.stop())
        await self._scheduler_control.close()
        self.client.stop()
        await self._control.stop()
        self._generation.prompts.close()
        self._structured.close()

    def stats(self) -> control_pb2.StatsResponse:
        """What ControlService.Stats answers."""
        counters = self._counters
        return control_pb2.StatsResponse(
            process=process_stats(),
            tokenizer=control_pb2.TokenizerStats(
                address=self.address,
                model_names=self._model.names,
                requests_running=self._admission.running,
                streams=self.client.streams,
                requests_total=counters.requests_total,
                responses_total=counters.responses_total,
                tokens_total=counters.tokens_total,
                scheduler_connected=self.client.connected,
                drain_seconds_total=counters.drain_seconds_total,
                drains_total=counters.drains_total,
                http_address=self._http.address,
                draining=self._draining,
                schedulers_lost_total=counters.schedulers_lost_total,
                choices_resubmitted_total=counters.choices_resubmitted_total,
            ),
        )

    @property
    def reason(self) -> str:
        """Why health says NOT_SERVING; empty when it does not."""
        if self._stopping:
            return "this process is shutting down"
        return "draining" if self._draining else self.client.reason

    async def _drain(self, request: control_pb2.DrainRequest) -> control_pb2.DrainResponse:
        """See ControlService."""
        self._draining = True
        self._admission.close("this process is draining")
        self._readiness_changed()
        seconds = request.grace_ms / 1000 if request.grace_ms else self._settings.shutdown_grace
        await self._admission.idle(seconds)
        return control_pb2.DrainResponse(requests_running=self._admission.running)

    async def _resume(self, request: control_pb2.ResumeRequest) -> control_pb2.ResumeResponse:
        """See ControlService."""
        if self._stopping:
            raise CallRefused(grpc.StatusCode.FAILED_PRECONDITION, "this process is shutting down")
        self._draining = False
        self._admission.open()
        self._readiness_changed()
        return control_pb2.ResumeResponse()

    def _readiness_changed(self) -> None:
        serving = not self.reason
        self._health.set_serving(serving)
        self._control.set_serving(serving)
        if serving:
            self._http.engine_ready()

    def _door(self) -> "Door":
        from triptych.services.tokenizer.openai_http.door import Door, HttpLimits

        return Door(
            generation=self._generation,
            admission=self._admission,
            counters=self._counters,
            limits=HttpLimits(
                self._settings.http_max_body_bytes, self._settings.max_streams + _MORE_CONNECTIONS
            ),
            reason=lambda: self.reason,
            stats=self.stats,
            scheduler_stats=self._scheduler_control.stats,
        )

    def _http_failed(self, error: BaseException) -> None:
        if not self.client.ended.done():
            self.client.ended.set_exception(error)

    def _public_server(self) -> grpc.aio.Server:
        limit = self._settings.max_message_bytes
        streams = self._settings.max_streams + _MORE_STREAMS
        server = grpc.aio.server(
            options=[
                # An old process and a new one would share the port in silence.
                ("grpc.so_reuseport", int(self._settings.reuse_port)),
                ("grpc.max_receive_message_length", limit),
                ("grpc.max_send_message_length", limit),
                ("grpc.max_concurrent_streams", streams),
                # Beyond 1000 that no handler has taken yet, gRPC would cancel some at random.
                ("grpc.server.max_pending_requests", streams),
                ("grpc.server.max_pending_requests_hard_limit", 2 * streams),
                # A stream is quiet while its request waits or its prompt is computed: take a
                # client's pings then, and ping it to notice that it is gone.
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_ping_strikes", 0),
                ("grpc.keepalive_time_ms", 20_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                # What the one before is not enough for: without it 60 s.
                ("grpc.http2.ping_timeout_ms", 10_000),
            ],
            compression=grpc.Compression.NoCompression,
        )
        unread = UnreadWatch(self._settings.unread_timeout)
        servicer = InferenceServicer(
            self._generation, self._admission, self._counters, limit, unread
        )
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
        doors = Doors(self._generation, self._admission, self._counters, unread, self._engine())
        for _, add in self._others:
            add(server, doors)
        self._health.add_to(server)
        add_reflection(server, (INFERENCE_SERVICE, *(name for name, _ in self._others)))
        return server

    def _engine(self) -> Engine:
        path = self._model.path
        return Engine(
            model_path=str(path) if path is not None else self._model.names[0],
            max_message_bytes=self._settings.max_message_bytes,
            folder=path if path is not None and path.is_dir() else None,
            scheduler_stats=self._scheduler_control.stats,
            flush_cache=self._scheduler_control.flush_cache,
            reason=lambda: self.reason,
        )


async def until_done(stopping: asyncio.Event, ended: "asyncio.Future[str]") -> str | None:
    """Wait for a stop signal (None) or the scheduler's refusal (its words). Raises a sink's bug."""
    waiting = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait((waiting, ended), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    return ended.result() if ended.done() else None
