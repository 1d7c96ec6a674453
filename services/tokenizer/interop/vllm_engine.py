"""vllm.grpc.engine.VllmEngine: what the SMG gateway and its like drive an engine by.

The messages come from the package `smg-grpc-proto`; this process loads it only where the service is
asked for. A request is translated and goes the way of Generate: one validation, one set of ends.
"""

import asyncio
import hashlib
import io
import re
import time
import zipfile
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from smg_grpc_proto.generated import common_pb2 as smg_pb2
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

import triptych
from triptych.engine_core.errors import InvalidRequest, NotSupported, Unavailable
from triptych.services.runtime.status import rpc_errors
from triptych.services.tokenizer.admission import Admission
from triptych.services.tokenizer.generation import Generation
from triptych.services.tokenizer.interop.engine import Engine
from triptych.services.tokenizer.interop.vllm_calls import VllmCalls
from triptych.services.tokenizer.interop.vllm_limits import LargestMessage
from triptych.services.tokenizer.interop.vllm_requests import to_generate
from triptych.services.tokenizer.interop.vllm_responses import VllmResponses
from triptych.services.tokenizer.servicer import check_deadline
from triptych.services.tokenizer.stats import Counters
from triptych.services.tokenizer.unread_watch import UnreadWatch
from triptych.v1 import inference_pb2

if TYPE_CHECKING:
    from typing import TypeAlias

    Context: TypeAlias = grpc.aio.ServicerContext[object, object]


_MOST_ABORTED = 1 << 16  # ids of one call
_CHUNK_BYTES = 1 << 20  # of a tokenizer bundle
_TOKENIZER_FILES = (
    "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken",
)  # fmt: skip
_NOT_BUNDLED = ("*.index.json",)
_FIELDS = (  # our names at the head of an error's, and the contract's
    (re.compile(r"^token_ids(\.ids)?"), "tokenized.input_ids"),
    (re.compile(r"^sampling_params\.structured_output\."), "sampling_params."),
)


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]  # untyped base
    """The rpcs, in the order of the contract."""

    def __init__(
        self,
        generation: Generation,
        admission: Admission,
        counters: Counters,
        unread: UnreadWatch,
        engine: Engine,
    ) -> None:
        self._generation = generation
        self._admission = admission
        self._counters = counters
        self._unread = unread
        self._engine = engine
        self._started = time.monotonic()
        self._received = 0.0
        self._calls = VllmCalls()
        self._bundle: asyncio.Task[bytes] | None = None

    async def Generate(  # noqa: N802
        self, request: vllm_engine_pb2.GenerateRequest, context: "Context"
    ) -> None:
        """Tokens in, tokens out."""
        self._received = time.time()
        async with rpc_errors(context):
            with self._admission.admit(request.ByteSize()):
                try:
                    await self._generate(request, context)
                except InvalidRequest as error:
                    field = error.field
                    for ours, theirs in _FIELDS:
                        field = ours.sub(theirs, field)
                    raise InvalidRequest(field, error.description) from error

    async def _generate(self, request: vllm_engine_pb2.GenerateRequest, context: "Context") -> None:
        check_deadline(context.time_remaining())
        asked = to_generate(request, self._generation.facts().max_model_len)
        with self._calls.open(request.request_id) as call:
            valid = await self._generation.generate(asked)
            largest = LargestMessage(
                self._engine.max_message_bytes, self._generation.facts().vocabulary_size
            )
            largest.check(valid, stream=request.stream)
            remaining = context.time_remaining()
            check_deadline(remaining)
            responses = VllmResponses(len(valid.prompt), stream=request.stream)
            with (
                self._unread.watching(context.write) as write,
                self._generation.start(valid, remaining=remaining) as running,
            ):
                call.runs(running)
                finished = False
                while not finished:
                    piece = await running.stream.next()
                    finished = piece.usage is not None
                    self._counters.responses_total += 1
                    self._counters.tokens_total += piece.new_tokens
                    response = running.response(inference_pb2.GenerateResponse, piece)
                    for message in responses.of(response, running.stream.cached_tokens):
                        await write(message)
                    await asyncio.sleep(0)  # a piece need not make a message

    async def Embed(  # noqa: N802
        self, request: vllm_engine_pb2.EmbedRequest, context: "Context"
    ) -> vllm_engine_pb2.EmbedResponse:
        """Not here."""
        async with rpc_errors(context):
            raise NotSupported("the served model generates text; it makes no embeddings")

    async def HealthCheck(  # noqa: N802
        self, request: vllm_engine_pb2.HealthCheckRequest, context: "Context"
    ) -> vllm_engine_pb2.HealthCheckResponse:
        """As grpc.health.v1, with the reason."""
        reason = self._engine.reason()
        return vllm_engine_pb2.HealthCheckResponse(healthy=not reason, message=reason or "serving")

    async def FlushCache(  # noqa: N802
        self, request: smg_pb2.FlushCacheRequest, context: "Context"
    ) -> smg_pb2.FlushCacheResponse:
        """Forget the prefix cache."""
        try:
            blocks = await self._engine.flush_cache()
        except Unavailable as error:
            return smg_pb2.FlushCacheResponse(success=False, message=error.message)
        return smg_pb2.FlushCacheResponse(success=True, message=f"{blocks} blocks forgotten")

    async def StartProfile(  # noqa: N802
        self, request: smg_pb2.StartProfileRequest, context: "Context"
    ) -> smg_pb2.ProfileResponse:
        """Not here."""
        return smg_pb2.ProfileResponse(success=False, message="this engine has no profiler rpc")

    async def StopProfile(  # noqa: N802
        self, request: smg_pb2.StopProfileRequest, context: "Context"
    ) -> smg_pb2.ProfileResponse:
        """Not here."""
        return smg_pb2.ProfileResponse(success=False, message="this engine has no profiler rpc")

    async def Abort(  # noqa: N802
        self, request: vllm_engine_pb2.AbortRequest, context: "Context"
    ) -> vllm_engine_pb2.AbortResponse:
        """End requests with finish reason "abort"; unknown ids may have ended just now."""
        async with rpc_errors(context):
            if (count := len(request.request_ids)) > _MOST_ABORTED:
                raise InvalidRequest("request_ids", f"{count} ids, more than {_MOST_ABORTED}")
            for request_id in set(request.request_ids):
                self._calls.abort(request_id)
            return vllm_engine_pb2.AbortResponse()

    async def GetModelInfo(  # noqa: N802
        self, request: vllm_engine_pb2.GetModelInfoRequest, context: "Context"
    ) -> vllm_engine_pb2.GetModelInfoResponse:
        """Of the one model."""
        async with rpc_errors(context):
            facts, tokenizer = self._generation.facts(), self._generation.tokenizer
            path = self._engine.model_path
            return vllm_engine_pb2.GetModelInfoResponse(
                model_path=path,
                tokenizer_path=path,
                is_generation=True,
                served_model_name=self._generation.names[0],
                max_context_length=facts.max_model_len,
                max_req_input_len=facts.max_model_len - 1,
                vocab_size=facts.vocabulary_size,
                model_type=facts.architecture,
                architectures=[facts.architecture],
                eos_token_ids=tokenizer.eos_token_ids,
            )

    async def GetServerInfo(  # noqa: N802
        self, request: vllm_engine_pb2.GetServerInfoRequest, context: "Context"
    ) -> vllm_engine_pb2.GetServerInfoResponse:
        """Of this process."""
        stats = await self._engine.scheduler_stats()
        return vllm_engine_pb2.GetServerInfoResponse(
            active_requests=self._admission.running,
            last_receive_timestamp=self._received,
            uptime_seconds=time.monotonic() - self._started,
            server_type="vllm-grpc",  # the contract's name, which gateways compare
            data_parallel_size=1,
            block_size=stats.scheduler.block_size if stats is not None else 0,
            max_num_seqs=stats.scheduler.max_num_seqs if stats is not None else 0,
            constrained_decoding_start="first_token",
        )

    async def GetLoads(  # noqa: N802
        self, request: vllm_engine_pb2.GetLoadsRequest, context: "Context"
    ) -> vllm_engine_pb2.GetLoadsResponse:
        """What the scheduler counts; zeros while it does not answer."""
        stats = await self._engine.scheduler_stats()
        load = vllm_engine_pb2.SchedulerLoad()
        if stats is not None:
            core = stats.scheduler
            used = core.blocks_total - core.blocks_free
            load.num_running_reqs = core.requests_running
            load.num_waiting_reqs = core.requests_waiting
            load.num_total_reqs = core.requests_running + core.requests_waiting
            load.num_used_tokens = used * core.block_size
            load.max_total_num_tokens = core.blocks_total * core.block_size
            load.token_usage = used / max(1, core.blocks_total)
            load.utilization = core.requests_running / max(1, core.max_num_seqs)
            load.cache_hit_rate = core.prefix_hits_total / max(1, core.prefix_queries_total)
            load.max_running_requests = core.max_num_seqs
        return vllm_engine_pb2.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=triptych.__version__,
            dp_rank_count=1,
            loads=[load],
        )

    async def GetTokenizer(  # noqa: N802
        self, request: smg_pb2.GetTokenizerRequest, context: "Context"
    ) -> None:
        """The tokenizer's files as a zip; the last chunk has its SHA-256."""
        async with rpc_errors(context):
            if self._engine.folder is None:
                raise NotSupported(
                    "the model is one GGUF file, which has no tokenizer files; "
                    "give the gateway a tokenizer of its own"
                )
            if self._bundle is None or _failed(
                self._bundle
            ):  # the files do not change while this process runs
                making = asyncio.to_thread(tokenizer_bundle, self._engine.folder)
                self._bundle = asyncio.create_task(making)
            data = await asyncio.shield(self._bundle)
            digest = hashlib.sha256(data).hexdigest()
            size = min(_CHUNK_BYTES, self._engine.max_message_bytes // 2)
            with self._unread.watching(context.write) as write:
                for start in range(0, len(data), size):
                    part = data[start : start + size]
                    last = start + size >= len(data)
                    await write(smg_pb2.GetTokenizerChunk(data=part, sha256=digest if last else ""))

    async def SubscribeKvEvents(  # noqa: N802
        self, request: smg_pb2.SubscribeKvEventsRequest, context: "Context"
    ) -> None:
        """Not here: gateways fall back to GetLoads."""
        await context.abort(
            grpc.StatusCode.UNIMPLEMENTED, "this engine publishes no KV-cache events"
        )


def _failed(task: asyncio.Task[bytes]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def tokenizer_bundle(folder: Path) -> bytes:
    """A zip of a folder's tokenizer files, the same bytes each time."""
    names = {
        path.name
        for pattern in _TOKENIZER_FILES
        for path in folder.glob(pattern)
        if path.is_file() and not any(path.match(each) for each in _NOT_BUNDLED)
    }
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name in sorted(names):
            bundle.writestr(zipfile.ZipInfo(name), (folder / name).read_bytes())
    return memory.getvalue()
