"""What an operator can ask of a running engine, beside facts: the supervisor's control calls."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import grpc

from triptych.services.cli.daemon_thread import in_daemon_thread
from triptych.services.cli.engine import EXECUTOR, TOKENIZER, read_stats, tokenizer_calls
from triptych.services.cli.engine_specs import find_model, specs_of, with_model, with_ports
from triptych.services.cli.fork_server import ForkServer
from triptych.services.cli.settings import EngineSettings
from triptych.services.cli.stage import READY, STOPPED, Stage
from triptych.services.cli.supervisor import Busy, Supervisor
from triptych.services.runtime.control_server import CallRefused, ControlCalls
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.runtime.model_files import ModelFiles, fingerprint
from triptych.services.runtime.run_dir import RunDir
from triptych.v1 import control_pb2

UNLOADED = "the model is unloaded (LoadModel loads it)"
_POLL = 0.05  # seconds
_IMPORT_SECONDS = 10.0
_JOIN_SECONDS = 30.0
_MOST_NAMES = 64
_LONGEST_NAME = 256

_T = TypeVar("_T")

_log = logging.getLogger(__name__)


class Operations:
    """Carries them out, one at a time. What is asked during start-up waits for its end."""

    def __init__(
        self,
        supervisor: Supervisor,
        fork_server: ForkServer,
        run_dir: RunDir,
        settings: EngineSettings,
        model_fingerprint: str,
    ) -> None:
        """`settings` are those that the children run with."""
        self._settings = settings
        self._supervisor = supervisor
        self._fork_server = fork_server
        self._run_dir = run_dir
        self._fingerprint = model_fingerprint
        self._started = asyncio.Event()
        self._drained_pid: int | None = None  # while the tokenizer is to stay drained
        self._again: asyncio.Task[None] | None = None

    def started(self, tokenizer: control_pb2.TokenizerStats) -> None:
        """Start-up is over, and the tokenizer has its ports: it keeps them."""
        self._settings = with_ports(self._settings, tokenizer)
        for spec in specs_of(self._settings):
            self._supervisor.replace_spec(spec)
        self._started.set()

    def changed(self) -> None:
        """A stage's state is another: a new tokenizer does not know that it is to be drained."""
        stage = self._supervisor.stage(TOKENIZER)
        if self._drained_pid in (None, stage.pid) or stage.state != READY:
            return
        self._drained_pid = stage.pid
        self._again = asyncio.create_task(self._drain_again())

    async def _drain_again(self) -> None:
        try:
            await self._forwarded_drain(1)
        except CallRefused as error:
            _log.warning("the new tokenizer is not drained: %s", error)

    def calls(self) -> ControlCalls:
        """For the supervisor's control server."""
        return ControlCalls(
            drain=self._drain,
            resume=self._resume,
            restart_executor=self._restart_executor,
            unload_model=self._unload_model,
            load_model=self._load_model,
        )

    # ------------------------------------------------------------------ the tokenizer's own

    async def _drain(self, request: control_pb2.DrainRequest) -> control_pb2.DrainResponse:
        await self._until_free()
        before, pid = self._drained_pid, self._supervisor.stage(TOKENIZER).pid
        self._drained_pid = pid
        try:
            return await self._forwarded_drain(request.grace_ms)
        except CallRefused:
            if self._drained_pid == pid:  # else a tokenizer that came meanwhile is drained
                self._drained_pid = before
            raise

    async def _resume(self, _request: control_pb2.ResumeRequest) -> control_pb2.ResumeResponse:
        await self._until_free()
        return await self._forwarded_resume()

    async def _forwarded_drain(self, grace_ms: int) -> control_pb2.DrainResponse:
        try:
            async with tokenizer_calls(self._run_dir) as stub:
                return await stub.Drain(control_pb2.DrainRequest(grace_ms=grace_ms))
        except grpc.aio.AioRpcError as error:
            raise _forwarded(error) from error

    async def _forwarded_resume(self) -> control_pb2.ResumeResponse:
        self._drained_pid = None
        try:
            async with tokenizer_calls(self._run_dir) as stub:
                return await stub.Resume(control_pb2.ResumeRequest())
        except grpc.aio.AioRpcError as error:
            raise _forwarded(error) from error

    async def _until_free(self) -> None:
        await self._started.wait()
        try:
            self._supervisor.check_free()
        except Busy as busy:
            raise CallRefused(grpc.StatusCode.ABORTED, f"{busy}; try again after it") from busy

    async def _alone(self, name: str, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        await self._until_free()
        try:
            return await self._supervisor.operate(name, work)
        except Busy as busy:
            raise CallRefused(grpc.StatusCode.UNAVAILABLE, str(busy)) from busy

    # ------------------------------------------------------------------ RestartExecutor

    async def _restart_executor(
        self, _request: control_pb2.RestartExecutorRequest
    ) -> control_pb2.RestartExecutorResponse:
        return await self._alone("RestartExecutor", self._restart)

    async def _restart(self) -> control_pb2.RestartExecutorResponse:
        stage, ranks = self._supervisor.stage(EXECUTOR), self._supervisor.together(EXECUTOR)
        if stage.state == STOPPED:
            raise CallRefused(grpc.StatusCode.FAILED_PRECONDITION, stage.reason)
        await self._take_new_code()
        failure = await self._supervisor.renew(EXECUTOR)
        for rank in ranks:
            failure = failure or await self._until_serving(rank)
        if failure is not None:
            said = f"the new executor {failure}; it is started again"
            raise CallRefused(grpc.StatusCode.UNAVAILABLE, said)
        seconds = time.monotonic() - min(rank.ended_at for rank in ranks)
        _log.info("executor restarted", extra={"pid": stage.pid, "s": seconds})
        return control_pb2.RestartExecutorResponse(pid=stage.pid, seconds=seconds)

    async def _take_new_code(self) -> None:
        """No more children with the code of before. The executor computes on while the new code is
        imported; where that fails or takes long, it is started as a program."""
        self._fork_server.replace()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_IMPORT_SECONDS):
                while not self._fork_server.ready:
                    await asyncio.sleep(_POLL)

    async def _until_serving(self, stage: Stage) -> str | None:
        """Wait until a scheduler has it; how it failed, if it did."""
        try:
            async with asyncio.timeout(_JOIN_SECONDS):
                return await stage.until_serving()
        except TimeoutError:
            raise CallRefused(
                grpc.StatusCode.UNAVAILABLE, "the new executor is ready, but no scheduler has it"
            ) from None

    # ------------------------------------------------------------------ UnloadModel, LoadModel

    async def _unload_model(
        self, request: control_pb2.UnloadModelRequest
    ) -> control_pb2.UnloadModelResponse:
        return await self._alone("UnloadModel", lambda: self._unload(request.grace_ms))

    async def _unload(self, grace_ms: int) -> control_pb2.UnloadModelResponse:
        if self._supervisor.stage(EXECUTOR).state == STOPPED:
            return control_pb2.UnloadModelResponse()
        resident = await self._resident_bytes()
        await self._end_requests(grace_ms)
        await self._supervisor.halt(EXECUTOR, UNLOADED)
        await self._take_requests()
        _log.info("model unloaded", extra={"bytes": resident})
        return control_pb2.UnloadModelResponse(bytes_freed=resident)

    async def _load_model(
        self, request: control_pb2.LoadModelRequest
    ) -> control_pb2.LoadModelResponse:
        return await self._alone("LoadModel", lambda: self._load(request))

    async def _load(self, request: control_pb2.LoadModelRequest) -> control_pb2.LoadModelResponse:
        begin = time.monotonic()
        current = self._settings.tokenizer
        names = tuple(request.served_model_names)
        _check_names(names)
        files, digest = await self._found(request.model or current.model)
        if not request.model:
            names = names or tuple(current.served_model_name or ())
        wanted = with_model(self._settings, files, names)
        if (wanted, digest) != (self._settings, self._fingerprint):
            await self._replace(wanted, request.grace_ms)
            self._fingerprint = digest
        else:
            await self._load_again()
        await self._take_requests()
        seconds = time.monotonic() - begin
        served = self._settings.tokenizer.served_model_name or ()
        _log.info("model loaded", extra={"model": files.path, "s": seconds})
        return control_pb2.LoadModelResponse(model_names=served, seconds=seconds)

    async def _load_again(self) -> None:
        """Have an executor with the model that there is."""
        states = {stage.state for stage in self._supervisor.together(EXECUTOR)}
        if STOPPED in states:
            failure = await self._supervisor.start_again(EXECUTOR)
        elif states != {READY}:
            failure = await self._supervisor.renew(EXECUTOR)
        else:
            return
        if failure is not None:
            raise CallRefused(grpc.StatusCode.FAILED_PRECONDITION, failure)

    async def _found(self, model: str) -> tuple[ModelFiles, str]:
        def find() -> tuple[ModelFiles, str]:
            files = find_model(model)
            return files, fingerprint(files)

        try:
            return await in_daemon_thread(find)
        except StartupError as error:
            raise CallRefused(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error

    async def _replace(self, wanted: EngineSettings, grace_ms: int) -> None:
        """Serve another model, or the one before when that fails. Raises CallRefused then."""
        await self._end_requests(grace_ms)
        failure = await self._supervisor.start_anew(specs_of(wanted))
        if failure is None:
            self._settings = wanted
            self._supervisor.keep_all()
            return
        _log.error("%s cannot be served: %s", wanted.tokenizer.model, failure)
        before = await self._supervisor.start_anew(specs_of(self._settings))
        self._supervisor.keep_all()
        again = "the model of before is served again"
        if before is not None:
            again = f"nor can the model of before: {before}; it is tried again"
        raise CallRefused(grpc.StatusCode.FAILED_PRECONDITION, f"{failure}; {again}")

    async def _end_requests(self, grace_ms: int) -> None:
        """Take no requests and let the open ones end; a tokenizer that is not there has none."""
        try:
            left = (await self._forwarded_drain(grace_ms)).requests_running
        except CallRefused as error:
            _log.warning("no drain: %s", error)
            return
        if left:
            _log.warning("requests cut off", extra={"requests": left})

    async def _take_requests(self) -> None:
        """Unless an operator has drained the engine: that ends with Resume only."""
        if self._drained_pid is not None:
            return
        try:
            await self._forwarded_resume()
        except CallRefused as error:
            _log.warning("no resume: %s", error)  # a new one takes them by itself

    async def _resident_bytes(self) -> int:
        resident = 0
        for stage in self._supervisor.together(EXECUTOR):
            try:
                resident += (await read_stats(self._run_dir, stage.name)).process.resident_bytes
            except grpc.aio.AioRpcError:
                continue  # it is not there
        return resident


def _check_names(names: Sequence[str]) -> None:
    """They become part of a command line. Raises CallRefused."""
    refused = None
    if len(names) > _MOST_NAMES:
        refused = f"{len(names)} of them, at most {_MOST_NAMES}"
    for name in names:
        if not 1 <= len(name) <= _LONGEST_NAME:
            refused = f"a name of {len(name)} characters, 1 to {_LONGEST_NAME} are allowed"
        elif not name.isprintable() or name.startswith("-"):
            refused = f"{name!r}: a name is printable, and begins with no dash"
    if refused is not None:
        raise CallRefused(grpc.StatusCode.INVALID_ARGUMENT, f"served_model_names: {refused}")


def _forwarded(error: grpc.aio.AioRpcError) -> CallRefused:
    return CallRefused(error.code(), f"{TOKENIZER}: {error.details()}")
