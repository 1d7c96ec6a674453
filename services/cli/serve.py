"""`triptych serve`: resolves the model, starts the three processes and supervises them.

The processes are forked where that is safe (see fork): what they have in common is imported here,
once. What only the panel needs is imported when there is something to show.
"""

import asyncio
import importlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import grpc

from triptych.services.cli.child import ChildSpec
from triptych.services.cli.engine import (
    EXECUTOR,
    PROCESSES,
    SCHEDULER,
    STOP_ORDER,
    TOKENIZER,
    is_serving,
    read_all_stats,
    read_load,
)
from triptych.services.cli.fork import fork_child, single_threaded
from triptych.services.cli.panel import Stats, print_panel
from triptych.services.cli.progress import StartupProgress
from triptych.services.cli.settings import EngineSettings, load_engine_settings
from triptych.services.cli.supervisor import Limits, Supervisor
from triptych.services.runtime.gguf_file import drop_handed, hand_down, open_gguf
from triptych.services.runtime.lifecycle import bind_to_parent, end_start, on_stop_signal
from triptych.services.runtime.logging import configure_logging
from triptych.services.runtime.model_files import resolve_model
from triptych.services.runtime.ports import check_port
from triptych.services.runtime.run_dir import RunDir
from triptych.services.runtime.settings import Settings, one_blas_thread, to_argv
from triptych.services.tokenizer.settings import TokenizerSettings

# What forked processes find imported: none of it is one service's own.
_ALL_NEED = (
    "triptych.services.runtime.control_server",
    "triptych.services.runtime.process_stats",
    "triptych.services.transport.channel",
    "triptych.services.transport.silence",
    "triptych.services.transport.wire",
    "triptych.v1.stage_pb2",
)
_STEPS_NEED = (
    "triptych.services.transport.fd_passing",
    "triptych.services.transport.ring_layouts",
    "triptych.services.transport.rings",
)
_STOP_MARGIN = 5.0  # seconds that the tokenizer gets on top of its drain

OnReady = Callable[[Stats, asyncio.Event], Awaitable[None]]


def run(argv: Sequence[str]) -> int:
    """The body of `triptych serve`. Raises StartupError."""
    settings = load_engine_settings(argv, prog="triptych serve")
    bind_to_parent(settings.serve.parent_pid)
    configure_logging(settings.serve.log_level, "supervisor")

    async def show(stats: Stats, _stop: asyncio.Event) -> None:
        from rich.console import Console

        print_panel(Console(stderr=True), stats, RunDir.open(settings.serve.run_dir).path)

    return serve(settings, show)


def serve(settings: EngineSettings, on_ready: OnReady) -> int:
    """Run the engine until a signal, or until `on_ready` sets the event that it is given.

    The exit code: 0 after a clean stop, a child's own code when it ended during start-up, 1 when a
    child could not be kept running. Raises StartupError.
    """
    run_dir = RunDir.open(settings.serve.run_dir)
    lock = run_dir.lock("supervisor")
    try:
        # The tokenizer would say so too, but only once all the others have loaded.
        _check_ports(settings.tokenizer)
        engine = _resolved(settings, run_dir)
        forked = _fork_processes(engine, lock)
        return asyncio.run(_serve(engine, run_dir, on_ready, forked))
    finally:
        os.close(lock)


def _check_ports(tokenizer: TokenizerSettings) -> None:
    if not tokenizer.reuse_port:
        check_port(tokenizer.host, tokenizer.port)
        if tokenizer.http:
            check_port(tokenizer.http_host, tokenizer.http_port, "--http-port")


def _resolved(settings: EngineSettings, run_dir: RunDir) -> EngineSettings:
    """Resolve the model once, so that the children agree on the files and none asks a hub."""
    files = resolve_model(settings.tokenizer.model)
    if files.kind == "gguf":
        # A broken header is said once, here, and not by two children.
        hand_down(open_gguf(files.path))
    told = {"model": str(files.path), "run_dir": str(run_dir.path), "parent_pid": os.getpid()}
    drafts = settings.executor.speculative_model
    if drafts is not None:
        drafts = str(resolve_model(drafts).path)
    names = settings.tokenizer.served_model_name or (files.name,)
    return EngineSettings(
        serve=settings.serve,
        tokenizer=settings.tokenizer.model_copy(update={**told, "served_model_name": names}),
        scheduler=settings.scheduler.model_copy(
            update={"run_dir": told["run_dir"], "parent_pid": told["parent_pid"]}
        ),
        executor=settings.executor.model_copy(update={**told, "speculative_model": drafts}),
    )


def _fork_processes(settings: EngineSettings, lock: int) -> dict[str, int]:
    """Fork what can be forked: pids by name. The rest is started as a program of its own.

    The tokenizer goes first: it has most to do, and does it while we import what the others need.
    """
    forked: dict[str, int] = {}

    def fork(name: str) -> None:
        if single_threaded():
            forked[name] = fork_child(name, partial(_run, name, settings), close=(lock,))

    try:
        _import_all(_ALL_NEED)
        fork(TOKENIZER)
        with one_blas_thread():
            _import_all(_STEPS_NEED)
        fork(SCHEDULER)
        fork(EXECUTOR)
    except BaseException:
        for pid in forked.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        raise
    drop_handed()
    end_start()
    return forked


def _import_all(names: Sequence[str]) -> None:
    for name in names:
        importlib.import_module(name)


def _run(name: str, settings: EngineSettings) -> int:
    """The whole life of a forked process."""
    if name == SCHEDULER:
        drop_handed()  # it reads no model
    if name == TOKENIZER:
        from triptych.services.tokenizer.__main__ import run as run_tokenizer

        return run_tokenizer(settings.tokenizer)
    if name == SCHEDULER:
        from triptych.services.scheduler.__main__ import run as run_scheduler

        return run_scheduler(settings.scheduler)
    from triptych.services.executor.__main__ import run as run_executor

    return run_executor(settings.executor)


def _spec(name: str, settings: Settings) -> ChildSpec:
    service = name.split("-", 1)[0]
    command = (sys.executable, "-m", f"triptych.services.{service}", *to_argv(settings))
    return ChildSpec(name, command)


async def _serve(
    settings: EngineSettings, run_dir: RunDir, on_ready: OnReady, forked: Mapping[str, int]
) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    on_stop_signal(stop.set, loop)
    progress = StartupProgress(PROCESSES, sys.stderr, lambda: read_load(run_dir))
    supervisor = Supervisor(
        specs=[_spec(name, _of(settings, name)) for name in PROCESSES],
        stop_order=STOP_ORDER,
        probe=lambda name: is_serving(run_dir, name),
        limits=Limits(
            grace=settings.serve.shutdown_grace + _STOP_MARGIN,
            startup_timeout=settings.serve.startup_timeout,
        ),
        progress=progress.note,
        forked=forked,
    )

    async def ready() -> None:
        progress.finish()
        stats = await _stats_soon(run_dir)
        # A tokenizer that is started again must come back where its clients look for it.
        tokenizer = stats[TOKENIZER].tokenizer
        ports = {"port": _port_of(tokenizer.address)}
        if tokenizer.http_address:
            ports["http_port"] = _port_of(tokenizer.http_address)
        supervisor.replace_spec(_spec(TOKENIZER, settings.tokenizer.model_copy(update=ports)))
        await on_ready(stats, stop)

    progress.start(lambda: supervisor.pids)
    try:
        return await supervisor.run(stop, ready)
    finally:
        progress.finish()


def _port_of(address: str) -> int:
    return int(address.rsplit(":", 1)[1])


async def _stats_soon(run_dir: RunDir) -> Stats:
    """The Stats of all processes, waiting where one has just gone and is being started again."""
    while True:
        try:
            return await read_all_stats(run_dir)
        except grpc.aio.AioRpcError:
            await asyncio.sleep(0.5)


def _of(settings: EngineSettings, name: str) -> Settings:
    match name:
        case "scheduler":
            return settings.scheduler
        case "executor-0":
            return settings.executor
        case _:
            return settings.tokenizer
