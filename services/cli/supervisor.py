"""Starts the processes of an engine, keeps them running, and stops them in order.

It knows nothing of what they do (see contact). A child that ends during start-up ends the engine
with the child's exit code; one that ends later is started again, as its stage decides. Children of
one service (`executor-0`, `executor-1`) are stopped, and operated on, together.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

from triptych.services.cli.cancellation import cancel
from triptych.services.cli.child import ChildSpec
from triptych.services.cli.patience import Limits
from triptych.services.cli.stage import CRASH_LOOP, Stage, StageLinks
from triptych.services.runtime.lifecycle import EXIT_FAILED, EXIT_GROUP, EXIT_OK, StartupError
from triptych.v1 import control_pb2

_CULPRIT_SECONDS = 1.0  # a child that ended because another had may be seen first

_log = logging.getLogger(__name__)

Progress = Callable[[str, str], None]
_T = TypeVar("_T")


class Busy(Exception):
    """An operation that cannot be carried out now; says why."""


class Supervisor:
    """Runs `specs`, started in the given order and stopped in `stop_order`."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        stop_order: Sequence[str],
        links: StageLinks,
        limits: Limits,
        progress: Progress = lambda _name, _event: None,
        forked: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """`forked` are pids of those of the specs' processes that run already, by name."""
        self._changed = links.changed
        links = replace(links, changed=self._stage_changed)
        self._stages = {
            spec.name: Stage(spec, links, limits, forked.get(spec.name)) for spec in specs
        }
        self._stop_order = tuple(stop_order)
        self._limits = limits
        self._progress = progress
        self._over: asyncio.Future[int] | None = None  # while it keeps the children running
        self._operation: asyncio.Task[Any] | None = None

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the children that run now."""
        return {name: stage.pid for name, stage in self._stages.items() if stage.pid}

    def stage(self, name: str) -> Stage:
        """The stage of that name. Raises KeyError."""
        return self._stages[name]

    def together(self, name: str) -> list[Stage]:
        """The stage of that name and those of the same service, in the order of their start."""
        service = service_of(name)
        return [stage for stage in self._stages.values() if service_of(stage.name) == service]

    def states(self) -> control_pb2.SupervisorStats:
        """What is known of each stage, in the order of their start."""
        return control_pb2.SupervisorStats(
            stages=[stage.describe() for stage in self._stages.values()]
        )

    def replace_spec(self, spec: ChildSpec) -> None:
        """Use another command when the child of that name is started again."""
        self._stages[spec.name].spec = spec

    async def run(
        self, stop: asyncio.Event, on_ready: Callable[[], Awaitable[None]] | None = None
    ) -> int:
        """Supervise until `stop` is set or a child cannot be kept running; the exit code.

        `on_ready` is awaited once all children are ready, while they are already watched; what it
        raises ends the engine and comes out here. Raises StartupError when start-up takes too long.
        """
        try:
            code = await self._until_stopped(self._start(self._stages.values()), stop)
            if code is None and not stop.is_set():
                self.keep_all()
                after = on_ready() if on_ready is not None else _nothing()
                code = await self._until_stopped(self._serve(after), stop)
            return EXIT_OK if code is None else code
        finally:
            self._over = None
            if self._operation is not None:
                await cancel(self._operation)
            await self._stop_all()

    # ------------------------------------------------------------------ for operators

    def check_free(self) -> None:
        """Raises Busy while an operation is carried out, and before and after all are kept."""
        if self._over is None:
            raise Busy("the engine stops")
        if self._operation is not None:
            raise Busy(f"{self._operation.get_name()} is under way")

    async def operate(self, name: str, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Carry out an operation, one at a time. It goes on when the caller is cancelled; the stop
        of the engine ends it. Raises Busy, and what the work raises."""
        self.check_free()
        operation = self._operation = asyncio.create_task(work(), name=name)
        operation.add_done_callback(self._operation_ended)
        try:
            return await asyncio.shield(operation)
        except asyncio.CancelledError:
            if operation.cancelled():
                raise Busy("the engine stops") from None
            raise

    async def start_anew(self, specs: Sequence[ChildSpec]) -> str | None:
        """Stop all children and start others in their place, which are not kept running until
        `keep_all`; how one of them failed, if one did."""
        for stages in self._stops():
            await _all(stage.halt(self._limits.grace_rest) for stage in stages)
        for spec in specs:
            self.replace_spec(spec)
        try:
            code = await self._start(self._stages.values())
        except StartupError as error:
            return str(error)
        return None if code is None else _failures(self._stages.values())

    async def start_again(self, name: str) -> str | None:
        """Start a service's children that were halted, and keep them running; how they failed, if
        they did: then they are halted again."""
        stages = self.together(name)
        reason = stages[0].reason
        try:
            code = await self._start(stages)
            failure = None if code is None else _failures(stages)
        except StartupError as error:
            failure = str(error)
        if failure is None:
            for stage in stages:
                stage.keep(self._keeper_ended)
        else:
            await self.halt(name, reason)
        return failure

    async def halt(self, name: str, reason: str) -> None:
        """End a service's children and start no others until `start_again`; the reason is for
        others to read."""
        await _all(stage.halt(self._limits.grace_rest, reason) for stage in self.together(name))

    async def renew(self, name: str) -> str | None:
        """Renew all children of a service at once; how the first that failed did, if one did."""
        renewals = [asyncio.ensure_future(stage.renew()) for stage in self.together(name)]
        try:
            for renewal in asyncio.as_completed(renewals):
                failure = await renewal
                if failure is not None:
                    return failure
        finally:
            await cancel(*renewals)
        return None

    def keep_all(self) -> None:
        """Start each child again whenever it ends, from now on."""
        if self._over is None:
            self._over = asyncio.get_running_loop().create_future()
        for stage in self._stages.values():
            stage.keep(self._keeper_ended)

    def _operation_ended(self, operation: asyncio.Task[Any]) -> None:
        self._operation = None
        if not operation.cancelled():
            operation.exception()  # seen, also where the caller has gone

    # ------------------------------------------------------------------ start, keep, stop

    async def _until_stopped(self, work: Awaitable[int | None], stop: asyncio.Event) -> int | None:
        working = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            await cancel(stopping)
            return working.result()
        await cancel(working)
        return None

    async def _start(self, stages: Collection[Stage]) -> int | None:
        """Launch children and wait for each; an exit code when one ends first."""
        for stage in stages:
            try:
                stage.launch()
            except OSError as error:
                raise StartupError(f"{stage.name} cannot be started: {error}") from error
        waits = {stage.name: asyncio.ensure_future(self._first_ready(stage)) for stage in stages}
        try:
            async with asyncio.timeout(self._limits.startup_timeout):
                for wait in asyncio.as_completed(waits.values()):
                    code = await wait
                    if code == EXIT_GROUP:
                        code = await self._culprit(waits.values())
                    if code is not None:
                        return code if code > 0 else EXIT_FAILED
        except TimeoutError:
            late = [name for name, wait in waits.items() if not wait.done()]
            raise StartupError(
                f"{', '.join(late)} not ready after {self._limits.startup_timeout:g} s; "
                "see --startup-timeout"
            ) from None
        finally:
            await cancel(*waits.values())
        return None

    async def _culprit(self, waits: Collection["asyncio.Future[int | None]"]) -> int:
        """The exit code of the child because of which another ended."""
        await asyncio.wait(waits, timeout=_CULPRIT_SECONDS)
        codes = [wait.result() for wait in waits if wait.done()]
        return next((code for code in codes if code not in (None, EXIT_GROUP)), EXIT_FAILED)

    async def _first_ready(self, stage: Stage) -> int | None:
        code = await stage.first_ready()
        if code is None:
            self._progress(stage.name, "ready")
        elif code <= 0:  # else the child has said why in a line of its own
            _log.error("%s %s during start-up", stage.name, stage.last_end)
        return code

    async def _serve(self, after: Awaitable[None]) -> int | None:
        """Keep every child running; an exit code when one cannot be kept."""
        if self._over is None:
            raise AssertionError("nothing is kept")
        over = self._over
        told = asyncio.ensure_future(after)
        both: set[asyncio.Future[Any]] = {told, over}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if told.done():
                told.result()
            return await over
        finally:
            await cancel(told)

    def _stage_changed(self) -> None:
        self._changed()
        looping = any(stage.state == CRASH_LOOP for stage in self._stages.values())
        if looping and self._limits.exit_on_crash_loop and self._over and not self._over.done():
            self._over.set_result(EXIT_FAILED)

    def _keeper_ended(self, keeper: asyncio.Task[None]) -> None:
        """A keeper ends only when it is cancelled, or by a bug."""
        if keeper.cancelled() or self._over is None or self._over.done():
            return
        error = keeper.exception()
        self._over.set_exception(error or AssertionError(f"{keeper.get_name()} ended"))

    async def _stop_all(self) -> None:
        """What comes later in the order is kept running until its turn: the first one drains."""
        grace = self._limits.grace
        for stages in self._stops():
            for stage in stages:
                if stage.pid:
                    self._progress(stage.name, "stopping")
            await _all(stage.halt(grace) for stage in stages)
            grace = self._limits.grace_rest

    def _stops(self) -> list[list[Stage]]:
        """The stages in the order to stop them in, those of a service together."""
        services = itertools.groupby(self._stop_order, service_of)
        return [[self._stages[name] for name in names] for _, names in services]


def service_of(name: str) -> str:
    """The service that a child is one of: "executor" of "executor-1"."""
    return name.split("-", 1)[0]


def _failures(stages: Iterable[Stage]) -> str:
    """How those ended that did, in words; without those that only followed."""
    ended = [stage for stage in stages if not stage.pid]
    culprits = [stage for stage in ended if not stage.dragged] or ended
    return "; ".join(f"{stage.name} {stage.last_end}" for stage in culprits)


async def _all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    await asyncio.gather(*work)


async def _nothing() -> None:
    return None
