"""The scheduler process: `python -m triptych.services.scheduler`."""

import asyncio
import logging
import os
import secrets
import sys
import threading
import time

import zmq

from triptych.services.runtime.control_server import ControlCalls, ControlServer
from triptych.services.runtime.last_words import last_words
from triptych.services.runtime.lifecycle import (
    EXIT_OK,
    StartupError,
    begin_start,
    bind_to_parent,
    end_start,
    on_stop_signal,
    run_main,
)
from triptych.services.runtime.logging import configure_logging
from triptych.services.runtime.process_stats import process_stats
from triptych.services.runtime.run_dir import RunDir
from triptych.services.runtime.settings import load_settings
from triptych.services.scheduler.logits_processors import load_processors
from triptych.services.scheduler.loop import StepLoop
from triptych.services.scheduler.loop_watch import LoopWatch, watch_loop
from triptych.services.scheduler.settings import SchedulerSettings
from triptych.v1 import control_pb2

_NAME = "scheduler"

_log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Run the scheduler until SIGTERM; the exit code is run_main's."""
    begin_start()
    return run_main(
        _NAME, lambda: _run(load_settings(SchedulerSettings, argv, prog="triptych scheduler"))
    )


def run(settings: SchedulerSettings) -> int:
    """`main` for settings that have been read: where a supervisor has forked this process."""
    return run_main(_NAME, lambda: _run(settings))


def _run(settings: SchedulerSettings) -> int:
    bind_to_parent(settings.parent_pid)
    configure_logging(settings.log_level, _NAME)
    run_dir = RunDir.open(settings.run_dir)
    with last_words(run_dir, _NAME):
        lock = run_dir.lock(_NAME)
        try:
            return asyncio.run(_serve(settings, run_dir))
        finally:
            os.close(lock)


async def _serve(settings: SchedulerSettings, run_dir: RunDir) -> int:
    """The event loop serves the control endpoint; the step loop has a thread of its own."""
    # Never 0, which says "unknown" on the wire, and never that of an earlier scheduler.
    epoch = secrets.randbits(63) + 1
    processors = load_processors(settings.logits_processors)
    try:
        steps = StepLoop(settings, run_dir, epoch, processors)
    except (OSError, zmq.ZMQError) as error:
        raise StartupError(f"sockets in {run_dir.path}: {error}") from error
    watch = LoopWatch(steps.snapshot, time.monotonic())
    timeout = settings.heartbeat_timeout
    control = ControlServer(run_dir, _NAME, lambda: _stats(steps, watch, timeout), _calls(steps))
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    stop = asyncio.Event()
    on_stop_signal(stop.set, loop)
    await control.start()
    thread = threading.Thread(target=_run_steps, args=(steps, loop, ended), name="steps")
    thread.start()
    end_start()
    _log.info("waiting for an executor", extra={"run_dir": run_dir.path, "epoch": epoch})
    watching = asyncio.create_task(
        watch_loop(
            lambda: steps.snapshot,
            watch,
            settings,
            lambda serving: control.set_serving(serving and not stop.is_set()),
            run_dir,
        )
    )
    for end in (ended, watching):
        end.add_done_callback(lambda _: stop.set())
    await stop.wait()
    control.set_serving(False)
    steps.stop()
    try:
        await ended  # raises what killed the step loop: the process dies with it
        if watching.done():
            watching.result()
    finally:
        watching.cancel()
        await control.stop()
    return EXIT_OK


def _calls(steps: StepLoop) -> ControlCalls:
    async def flush_cache(
        _request: control_pb2.FlushCacheRequest,
    ) -> control_pb2.FlushCacheResponse:
        forgotten = await asyncio.wrap_future(steps.forget_cache())
        return control_pb2.FlushCacheResponse(blocks_forgotten=forgotten)

    return ControlCalls(flush_cache=flush_cache)


def _run_steps(
    steps: StepLoop, loop: asyncio.AbstractEventLoop, ended: "asyncio.Future[None]"
) -> None:
    error: BaseException | None = None
    try:
        steps.run()
    except BaseException as caught:  # the top of the thread: it goes on in the main thread
        error = caught

    def end() -> None:
        ended.set_exception(error) if error is not None else ended.set_result(None)

    loop.call_soon_threadsafe(end)


def _stats(steps: StepLoop, watch: LoopWatch, timeout: float) -> control_pb2.StatsResponse:
    process = process_stats()
    watch.describe(process, timeout)
    return control_pb2.StatsResponse(process=process, scheduler=steps.snapshot.stats)


if __name__ == "__main__":
    sys.exit(main())
