"""`triptych serve`: resolves the model, starts the three processes and supervises them.

The processes are forked where that is safe (see fork): what they have in common is imported here,
once. What only the panel needs is imported when there is something to show.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import grpc

from triptych.services.cli.common_imports import import_what_all_need, import_what_steps_need
from triptych.services.cli.engine import (
    SCHEDULER,
    SUPERVISOR,
    TOKENIZER,
    ControlContact,
    read_all_stats,
    read_load,
    stop_order,
)
from triptych.services.cli.engine_specs import executor_settings, names_of, resolved, specs_of
from triptych.services.cli.fork import fork_child, single_threaded
from triptych.services.cli.fork_server import ForkServer
from triptych.services.cli.operations import Operations
from triptych.services.cli.panel import Stats, print_panel
from triptych.services.cli.patience import Limits
from triptych.services.cli.progress import StartupProgress
from triptych.services.cli.restart_policy import RestartRules
from triptych.services.cli.settings import EngineSettings, load_engine_settings
from triptych.services.cli.stage import StageLinks
from triptych.services.cli.supervisor import Supervisor
from triptych.services.cli.supervisor_control import SupervisorControl
from triptych.services.runtime.gguf_file import drop_handed, hand_down, open_gguf
from triptych.services.runtime.last_words import take_words
from triptych.services.runtime.lifecycle import (
    StartupError,
    bind_to_parent,
    end_start,
    on_stop_signal,
)
from triptych.services.runtime.logging import configure_logging
from triptych.services.runtime.model_files import fingerprint
from triptych.services.runtime.ports import check_port
from triptych.services.runtime.run_dir import RunDir
from triptych.services.runtime.stage_states import remove_states, write_states
from triptych.services.runtime.stale_files import remove_stale, remove_stale_of
from triptych.services.tokenizer.settings import TokenizerSettings

_STOP_MARGIN = 5.0  # seconds that the tokenizer gets on top of its drain

_log = logging.getLogger(__name__)

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
    lock = run_dir.lock(SUPERVISOR)
    fork_server = ForkServer()
    try:
        remove_states(run_dir)
        for name in remove_stale(run_dir):
            _log.info("removed %s, which a killed process left", name)
        # The tokenizer would say so too, but only once all the others have loaded.
        _check_ports(settings.tokenizer)
        engine, files = resolved(settings, run_dir)
        if files.kind == "gguf":
            # A broken header is said once, here, and not by two children.
            hand_down(open_gguf(files.path))
        forked = _fork_processes(engine, lock, fork_server)
        start = _Start(engine, fingerprint(files), forked, fork_server)
        return asyncio.run(_serve(start, run_dir, on_ready))
    finally:
        fork_server.close()
        remove_states(run_dir)
        os.close(lock)


def _check_ports(tokenizer: TokenizerSettings) -> None:
    if not tokenizer.reuse_port:
        check_port(tokenizer.host, tokenizer.port)
        if tokenizer.http:
            check_port(tokenizer.http_host, tokenizer.http_port, "--http-port")


def _fork_processes(settings: EngineSettings, lock: int, fork_server: ForkServer) -> dict[str, int]:
    """Fork what can be forked: pids by name. The rest is started as a program of its own.

    The tokenizer goes first: it has most to do, and does it while we import what the others need.
    """
    forked: dict[str, int] = {}

    def fork(name: str) -> None:
        if single_threaded():
            forked[name] = fork_child(name, partial(_run, name, settings), close=(lock,))

    try:
        import_what_all_need()
        fork(TOKENIZER)
        import_what_steps_need()
        fork(SCHEDULER)
        for name in executor_settings(settings):
            fork(name)
    except BaseException:
        for pid in forked.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        raise
    drop_handed()
    end_start()
    fork_server.fork_here(close=(lock,))
    return forked


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

    return run_executor(executor_settings(settings)[name])


@dataclass(frozen=True, slots=True)
class _Start:
    """What is known before the event loop runs."""

    settings: EngineSettings
    fingerprint: str
    forked: Mapping[str, int]
    fork_server: ForkServer


async def _serve(start: _Start, run_dir: RunDir, on_ready: OnReady) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    names = names_of(start.settings)
    progress = StartupProgress(names, sys.stderr, lambda: read_load(run_dir))

    def changed() -> None:
        try:
            write_states(run_dir, supervisor.states())
        except OSError as error:  # a full disk, or a folder that somebody removed
            _log.warning("states cannot be written: %s", error)
        control.changed()
        operations.changed()

    supervisor = Supervisor(
        specs=specs_of(start.settings),
        stop_order=stop_order(start.settings.executor.tensor_parallel_size),
        links=StageLinks(
            contact=lambda name: ControlContact(run_dir, name),
            changed=changed,
            ended=lambda name: _ended(run_dir, name),
            fork=start.fork_server.fork,
        ),
        limits=_limits(start.settings),
        progress=progress.note,
        forked=start.forked,
    )
    operations = Operations(
        supervisor, start.fork_server, run_dir, start.settings, start.fingerprint
    )
    control = SupervisorControl(run_dir, supervisor, operations)

    def end() -> None:
        control.stop_begins()
        stop.set()

    async def ready() -> None:
        progress.finish()
        stats = await _stats_soon(run_dir, names)
        operations.started(stats[TOKENIZER].tokenizer)
        await on_ready(stats, stop)

    on_stop_signal(end, loop)
    progress.start(lambda: supervisor.pids)
    try:
        async with control.running():
            return await supervisor.run(stop, ready)
    finally:
        progress.finish()


def _ended(run_dir: RunDir, name: str) -> str:
    """Clean up after a process; its last words."""
    words = take_words(run_dir, name)
    try:
        remove_stale_of(run_dir, name)
    except (OSError, StartupError) as error:
        _log.warning("what %s left cannot be removed: %s", name, error)
    return words


def _limits(settings: EngineSettings) -> Limits:
    serve, scheduler = settings.serve, settings.scheduler
    return Limits(
        startup_timeout=serve.startup_timeout,
        grace=settings.tokenizer.shutdown_grace + _STOP_MARGIN,
        heartbeat_interval=scheduler.heartbeat_interval,
        heartbeat_timeout=scheduler.heartbeat_timeout,
        restarts=RestartRules(
            max_restarts=serve.max_restarts,
            window=serve.restart_window,
            longest_delay=serve.restart_delay_max,
        ),
        exit_on_crash_loop=serve.exit_on_crash_loop,
    )


async def _stats_soon(run_dir: RunDir, names: Sequence[str]) -> Stats:
    """The Stats of all processes, waiting where one has just gone and is being started again."""
    while True:
        try:
            return await read_all_stats(run_dir, names)
        except grpc.aio.AioRpcError:
            await asyncio.sleep(0.5)
