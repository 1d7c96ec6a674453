"""The executor process: `python -m triptych.services.executor --model FILE`."""

import asyncio
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from triptych.services.executor.affinity import cores_to_pin
from triptych.services.executor.backend import (
    Backend,
    BackendFacts,
    BackendOptions,
    DeviceFacts,
    MeasuredBackend,
    open_backend,
    refuse_misplaced,
)
from triptych.services.executor.collectives import ALONE, Collectives
from triptych.services.executor.memory_nodes import read_nodes
from triptych.services.executor.rank_group import RankGroup
from triptych.services.executor.rank_meeting import Member, meet, settings_to_share
from triptych.services.executor.settings import ExecutorSettings
from triptych.services.executor.stats import Counters, executor_stats
from triptych.services.executor.step_timeout import StepTimeout
from triptych.services.executor.worker import Worker
from triptych.services.runtime.activity import Watch
from triptych.services.runtime.control_server import ControlServer
from triptych.services.runtime.last_words import end_hung, last_words
from triptych.services.runtime.lifecycle import (
    EXIT_OK,
    begin_start,
    bind_to_parent,
    end_start,
    on_stop_signal,
    run_main,
)
from triptych.services.runtime.logging import configure_logging
from triptych.services.runtime.model_files import ModelFiles, fingerprint, resolve_model
from triptych.services.runtime.process_stats import process_stats
from triptych.services.runtime.run_dir import RunDir
from triptych.services.runtime.settings import load_settings
from triptych.v1 import control_pb2

if TYPE_CHECKING:  # loaded where there is one
    from triptych.services.executor.draft_model import DraftModel

_PROGRESS_SECONDS = 5.0
_WATCH_SECONDS = 0.1
_STOP_SECONDS = 8.0  # a step in flight

_log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Run the executor until SIGTERM; the exit code is run_main's."""
    begin_start()
    return run_main(
        "executor", lambda: _run(load_settings(ExecutorSettings, argv, prog="triptych executor"))
    )


def run(settings: ExecutorSettings) -> int:
    """`main` for settings that have been read: where a supervisor has forked this process."""
    return run_main("executor", lambda: _run(settings))


def _run(settings: ExecutorSettings) -> int:
    bind_to_parent(settings.parent_pid)
    name = f"executor-{settings.rank}"
    configure_logging(settings.log_level, name)
    run_dir = RunDir.open(settings.run_dir)
    with last_words(run_dir, name):
        lock = run_dir.lock(name)
        try:
            return asyncio.run(_Process(settings, run_dir, name).run())
        finally:
            os.close(lock)


def _options(settings: ExecutorSettings) -> BackendOptions:
    cache = settings.weight_cache
    usable = os.sched_getaffinity(0)
    threads = settings.cpu_threads or max(1, len(usable) // settings.tensor_parallel_size)
    nodes = read_nodes(usable)
    # A share that nobody asked for stays the backend's choice, which leaves the machine its memory.
    return BackendOptions(
        device=settings.device,
        dtype=settings.dtype,
        plan="eager" if settings.enforce_eager else settings.executor_plan,
        max_model_len=settings.max_model_len,
        block_size=settings.block_size,
        kv_cache_memory=settings.kv_cache_memory,
        memory_utilization=settings.memory_utilization,
        kv_cache_dtype=settings.kv_cache_dtype,
        activation_dtype=settings.activation_dtype,
        quantization=settings.quantization,
        threads=threads,
        affinity=cores_to_pin(settings.cpu_affinity, threads, usable, nodes),
        nodes=nodes,
        isa=None if settings.cpu_isa == "auto" else settings.cpu_isa,
        weight_cache=None if cache == "off" else Path(cache).expanduser(),
        rank=settings.rank,
        tensor_parallel_size=settings.tensor_parallel_size,
        swap_space=settings.swap_space,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        deterministic=settings.deterministic,
        capture_sizes=settings.capture_sizes,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
    )


def _collectives(group: RankGroup, options: BackendOptions) -> Collectives:
    # Loads torch: only where it is used.
    from triptych.services.executor.device.group_collectives import open_collectives

    return open_collectives(group, options.device, deterministic=options.deterministic)


class _Progress:
    """Counts how far the weights are, for who asks; says it at most every five seconds."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._said = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        self._counters.load_bytes = (done, total)
        now = time.monotonic()
        if now - self._said >= _PROGRESS_SECONDS and total > 0:
            self._said = now
            _log.info(
                "loading weights %d%%", 100 * done // total, extra={"bytes": done, "of": total}
            )


class _Process:
    """The event loop serves the control endpoint; a thread loads the model and computes steps."""

    def __init__(self, settings: ExecutorSettings, run_dir: RunDir, name: str) -> None:
        self._settings = settings
        self._run_dir = run_dir
        self._name = name
        self._control = ControlServer(run_dir, name, self._stats)
        self._counters = Counters(Watch(settings.heartbeat_timeout))
        self._worker = Worker(
            run_dir, name, settings.rank, settings.heartbeat_interval, self._counters
        )
        self._facts: BackendFacts | None = None
        self._draft_facts: BackendFacts | None = None
        self._measured: MeasuredBackend | None = None
        self._stopping = threading.Event()
        self._group: RankGroup | None = None  # of several ranks, once they have met

    async def run(self) -> int:
        files = resolve_model(self._settings.model)
        drafts = self._settings.speculative_model
        draft_files = None if drafts is None else resolve_model(drafts)
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        stop = asyncio.Event()
        on_stop_signal(stop.set, loop)
        await self._control.start()
        # A daemon: a step (or a load) that never returns cannot keep the process alive.
        thread = threading.Thread(
            target=self._work, args=(files, draft_files, loop, ended), name="worker", daemon=True
        )
        thread.start()
        watch = asyncio.create_task(self._watch())
        ended.add_done_callback(lambda _: stop.set())
        await stop.wait()
        watch.cancel()
        self._control.set_serving(False)
        self._stopping.set()
        if self._group is not None:
            self._group.leave()
        self._worker.stop()
        if not ended.done() and self._facts is not None:
            await asyncio.wait({ended}, timeout=_STOP_SECONDS)
        await self._control.stop()
        if not ended.done():
            if self._facts is not None:
                _log.warning("the step in flight does not end; leaving it")
            if self._group is not None:
                self._group.close()
            logging.shutdown()
            os._exit(EXIT_OK)
        thread.join()
        ended.result()  # raises what ended the worker
        return EXIT_OK

    def _work(
        self,
        files: ModelFiles,
        draft_files: ModelFiles | None,
        loop: asyncio.AbstractEventLoop,
        ended: "asyncio.Future[None]",
    ) -> None:
        error: BaseException | None = None
        try:
            self._serve(files, draft_files)
        except BaseException as caught:  # the top of the thread: it goes on in the main thread
            error = caught

        def end() -> None:
            if not ended.done():
                ended.set_exception(error) if error is not None else ended.set_result(None)

        loop.call_soon_threadsafe(end)

    def _serve(self, files: ModelFiles, draft_files: ModelFiles | None) -> None:
        options, digest = _options(self._settings), fingerprint(files)
        refuse_misplaced(options)
        if options.tensor_parallel_size == 1:
            backend, draft = self._open(files, draft_files, options)
            self._worker.run(backend, digest, draft)
            return
        member = Member(
            options.rank, options.tensor_parallel_size, digest, settings_to_share(options)
        )
        group = self._group = meet(self._run_dir, self._name, member, self._stopping)
        if group is None:
            return  # told to stop
        try:
            backend, draft = self._open(files, draft_files, options, _collectives(group, options))
            self._worker.run(backend, digest, draft, group)
        finally:
            group.close()

    def _open(
        self,
        files: ModelFiles,
        draft_files: ModelFiles | None,
        options: BackendOptions,
        collectives: Collectives = ALONE,
    ) -> "tuple[Backend, DraftModel | None]":
        started = time.monotonic()
        _log.info("loading weights of %s", files.name)
        progress = _Progress(self._counters)
        backend: Backend
        draft: DraftModel | None = None
        if draft_files is None:
            backend = open_backend(files, options, progress, collectives)
        else:
            from triptych.services.executor.draft_opening import open_with_draft

            backend, draft = open_with_draft(files, draft_files, options, progress)
            self._draft_facts = draft.facts
        self._counters.load_bytes = (0, 0)
        self._facts = facts = backend.facts
        self._measured = backend if isinstance(backend, MeasuredBackend) else None
        end_start()
        self._counters.load_seconds = time.monotonic() - started
        _log.info(
            "model loaded",
            extra={
                "architecture": facts.architecture,
                "dtype": facts.dtype,
                "kv_cache_dtype": facts.kv_cache_dtype,
                "plan": facts.plan,
                "num_blocks": facts.num_blocks,
                "block_size": facts.block_size,
                "draft_model": "none" if draft is None else draft.facts.model,
                "seconds": self._counters.load_seconds,
            },
        )
        if self._measured is not None:
            self._say_device(facts, self._measured.device_facts())
        return backend, draft

    def _say_device(self, facts: BackendFacts, device: DeviceFacts) -> None:
        _log.info(
            "device ready",
            extra={
                "device": facts.device,
                "rank": self._settings.rank,
                "ranks": self._settings.tensor_parallel_size,
                "weight_bytes": facts.weight_bytes,
                "kv_cache_bytes": facts.kv_cache_bytes,
                "num_host_blocks": facts.num_host_blocks,
                "num_graphs": device.num_graphs,
                "graph_bytes": device.graph_bytes,
                "peak_memory_bytes": device.peak_memory_bytes,
            },
        )

    async def _watch(self) -> None:
        """SERVING while a scheduler has us and no step is stuck; one that is hung, or never begun,
        ends the process."""
        watch = self._counters.watch
        timeout = StepTimeout(self._settings.step_timeout, time.monotonic())
        while True:
            now = time.monotonic()
            step = watch.oldest_step
            if step is None and self._worker.step_waits:
                step = watch.progress  # another one as soon as any step ends
            age = timeout.passed(step, now)
            if age is not None:
                words = f"a step takes {age:.0f} s, longer than step_timeout: hung"
                end_hung(self._run_dir, self._name, words)
            self._control.set_serving(self._worker.joined and not watch.at(now).stuck)
            await asyncio.sleep(_WATCH_SECONDS)

    def _stats(self) -> control_pb2.StatsResponse:
        return control_pb2.StatsResponse(
            process=process_stats(self._counters.watch.at(time.monotonic())),
            executor=executor_stats(
                self._facts,
                self._counters,
                self._draft_facts,
                None if self._measured is None else self._measured.device_facts(),
                (self._settings.rank, self._settings.tensor_parallel_size),
            ),
        )


if __name__ == "__main__":
    sys.exit(main())
