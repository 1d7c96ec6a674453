"""One process that is kept running: its lives, one after the other, and the state between them.

It knows nothing of what the process does. A life begins with `launch`, is ready when its contact
says so, and ends by itself, because the process is killed (it does not get ready, or falls silent),
or because an operator wants a new one (`renew`) or none (`halt`).
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from triptych.services.cli.cancellation import cancel
from triptych.services.cli.child import Child, ChildSpec
from triptych.services.cli.contact import Contact, until_silent
from triptych.services.cli.patience import Limits, start_failing
from triptych.services.cli.restart_policy import RestartPolicy
from triptych.v1 import control_pb2

STARTING = control_pb2.StageState.STATE_STARTING
READY = control_pb2.StageState.STATE_READY
RESTARTING = control_pb2.StageState.STATE_RESTARTING
CRASH_LOOP = control_pb2.StageState.STATE_CRASH_LOOP
STOPPED = control_pb2.StageState.STATE_STOPPED

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StageLinks:
    """What a stage is told from outside and tells."""

    contact: Callable[[str], Contact]
    """A line to the child of that name, for one life."""
    changed: Callable[[], None] = lambda: None
    """The state, pid or reason is another."""
    ended: Callable[[str], str] = lambda _name: ""
    """Called when a child of that name has ended: to clean up after it, and for its last words."""
    fork: Callable[[ChildSpec], int | None] = lambda _spec: None
    """A pid of a new child of this process, which was forked; None: it is started as a program."""


class Stage:
    """Runs one process. Event loop of the main thread only."""

    def __init__(
        self, spec: ChildSpec, links: StageLinks, limits: Limits, forked: int | None = None
    ) -> None:
        """`forked` is the pid of its first life, where that runs already."""
        self.spec = spec
        self.state: control_pb2.StageState.State.ValueType = STARTING
        self.restarts_total = 0
        self.last_end = ""
        self.ended_at = 0.0  # monotonic seconds; of the last life that is over
        self.reason = ""
        self.dragged = False  # the last life that is over ended with that of another process
        self._links = links
        self._limits = limits
        self._forked = forked
        self._policy = RestartPolicy(limits.restarts)
        self._child: Child | None = None
        self._contact: Contact | None = None
        self._ready = asyncio.Event()
        self._stillborn = False  # the last life ended by itself, and was never ready
        self._renewal = asyncio.Event()
        self._renewed: asyncio.Future[str | None] | None = None
        self._keeper: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """The child's name."""
        return self.spec.name

    @property
    def pid(self) -> int:
        """Of the life that runs; 0: none does."""
        return self._child.pid if self._child is not None and self._child.running else 0

    def describe(self) -> control_pb2.StageState:
        """The facts, as Stats and the file of states carry them."""
        return control_pb2.StageState(
            name=self.name,
            state=self.state,
            pid=self.pid,
            restarts_total=self.restarts_total,
            last_end=self.last_end,
            reason=self.reason,
        )

    # ------------------------------------------------------------------ one life

    def launch(self) -> None:
        """Begin a life that is not kept yet: `keep` does that. Raises OSError where the machine has
        no process to give."""
        self._begin()
        self._become(STARTING, "it starts")

    async def until_serving(self) -> str | None:
        """Wait until the life that runs does its work; how it ended, if it did before."""
        child, contact = self._child, self._contact
        if child is None or contact is None:
            return self.last_end
        exited = asyncio.ensure_future(child.exited())
        serving = asyncio.ensure_future(contact.until_serving())
        try:
            await asyncio.wait({exited, serving}, return_when=asyncio.FIRST_COMPLETED)
            if not exited.done():
                return None
            self.dragged = exited.result().dragged
            return exited.result().how
        finally:
            await cancel(exited, serving)

    async def first_ready(self) -> int | None:
        """Wait until a launched life does its work; its exit code when it ended before."""
        child, _ = self._living()
        how = await self.until_serving()
        if how is None:
            self._note_ready()
            return None
        await self._bury(how)
        return (await child.exited()).code

    def _begin(self) -> None:
        forked, self._forked = self._forked, None
        # The code on disk may be newer than what a fork has imported, and not fit it.
        if forked is None and not self._stillborn:
            forked = self._links.fork(self.spec)
        self._ready.clear()
        self._child = Child(self.spec, forked)
        self._contact = self._links.contact(self.name)

    def _living(self) -> tuple[Child, Contact]:
        if self._child is None or self._contact is None:
            raise AssertionError(f"{self.name} has not been launched")
        return self._child, self._contact

    def _note_ready(self) -> None:
        self._policy.ready(time.monotonic())
        self._ready.set()
        if not self._renewal.is_set():
            self._tell_renewed(None)
        # Also in a crash loop: it works now, and the policy goes on counting.
        self._become(READY)

    async def _bury(self, how: str) -> None:
        """Clean up after a life that is over, and remember how it ended."""
        contact, self._contact = self._contact, None
        if contact is not None:
            await contact.close()
        words = self._links.ended(self.name)
        self.last_end = f"{how}: {words}" if words else how
        self.ended_at = time.monotonic()

    def _become(self, state: control_pb2.StageState.State.ValueType, reason: str = "") -> None:
        self.state, self.reason = state, reason
        self._links.changed()

    # ------------------------------------------------------------------ life after life

    def keep(self, failed: Callable[[asyncio.Task[None]], None]) -> None:
        """Start the process whenever it does not run, from now on. `failed` is told of the end of
        the task that does so, which is our own fault unless it was cancelled."""
        self._renewal.clear()
        self._keeper = asyncio.create_task(self._keep(), name=f"keep {self.name}")
        self._keeper.add_done_callback(failed)

    async def renew(self) -> str | None:
        """End the life that runs, in its own time, and begin another at once; what happened so far
        is not held against it. Returns how the new life ended, where it was never ready.

        Nothing of this is undone when the caller is cancelled.
        """
        if self._renewed is None:
            self._renewed = asyncio.get_running_loop().create_future()
        self._ready.clear()
        self._renewal.set()
        return await asyncio.shield(self._renewed)

    async def halt(self, grace: float, reason: str = "") -> None:
        """End the process, with SIGKILL after `grace` seconds, and keep none. Safe to repeat.

        With a reason the stage is STOPPED from the start; without one others are not told.
        """
        if self._keeper is not None:
            keeper, self._keeper = self._keeper, None
            await cancel(keeper)
        self._policy.forget()
        self._tell_renewed("was stopped")
        if reason:
            self._become(STOPPED, reason)
        if self._child is not None and self._child.running:
            await self._child.stop(grace)
            await self._bury("was stopped")
            self._links.changed()

    def _tell_renewed(self, how: str | None) -> None:
        renewed, self._renewed = self._renewed, None
        if renewed is not None:
            renewed.set_result(how)

    async def _keep(self) -> None:
        if not self.pid:
            self._become(STARTING, "it starts")
            await self._begin_again()
        while True:
            how = await self._live()
            born = self._ready.is_set()
            self._stillborn = how is not None and not born and not self.dragged
            delay = 0.0
            if how is None:
                await self._end_for_renewal()
            else:
                await self._bury(how)
                delay = self._follow(born=born) if self.dragged else self._judge()
            if delay > 0:
                await self._sleep_unless_renewed(delay)
            self._renewal.clear()
            self.restarts_total += 1
            await self._begin_again()
            self._links.changed()

    async def _begin_again(self) -> None:
        """Begin a life, however often that takes: one that cannot begin is an end like others."""
        while True:
            try:
                self._begin()
            except OSError as error:
                self.last_end = f"could not be started: {error}"
                self.ended_at = time.monotonic()
                await self._sleep_unless_renewed(self._judge())
                self._renewal.clear()
            else:
                return

    async def _live(self) -> str | None:
        """Follow a life: how it ended; None when it is to be renewed."""
        child, contact = self._living()
        self.dragged = False
        exited = asyncio.ensure_future(child.exited())
        failing = asyncio.create_task(self._until_failing(contact))
        renewal = asyncio.create_task(self._renewal.wait())
        try:
            await asyncio.wait({exited, failing, renewal}, return_when=asyncio.FIRST_COMPLETED)
            if exited.done():
                self.dragged = exited.result().dragged
                return exited.result().how
            if failing.done():
                why = failing.result()
                _log.error("%s %s: killed", self.name, why, extra={"pid": child.pid})
                await child.kill()
                return why
            return None
        finally:
            await cancel(exited, failing, renewal)

    async def _until_failing(self, contact: Contact) -> str:
        """Follow a life that runs until it must be ended, and say why."""
        limits = self._limits
        if not self._ready.is_set():
            failing = await start_failing(contact, limits)
            if failing is not None:
                return failing
            self._note_ready()
        await until_silent(contact, limits.heartbeat_interval, limits.heartbeat_timeout)
        return f"gave no answer for {limits.heartbeat_timeout:g} s"

    async def _end_for_renewal(self) -> None:
        child, _ = self._living()
        self._policy.forget()
        self._become(RESTARTING, "an operator has it started again")
        await child.stop(self._limits.grace_rest)
        await self._bury("was stopped to be started again")

    def _follow(self, *, born: bool) -> float:
        """It ended with another, and is not to blame: the delay, where it comes to that again and
        again."""
        _log.warning("%s %s: starting it again", self.name, self.last_end)
        self._become(RESTARTING, f"it {self.last_end}")
        return 0.0 if born else self._limits.restarts.first_delay

    def _judge(self) -> float:
        """What becomes of it: the delay before it is started again, in seconds."""
        if not self._renewal.is_set():
            self._tell_renewed(self.last_end)
        verdict = self._policy.ended(time.monotonic())
        again = f"trying again in {verdict.delay:g} s" if verdict.delay else "starting it again"
        if verdict.crash_loop:
            _log.error(
                "%s %s; that was end %d in a row, a crash loop: %s",
                self.name, self.last_end, verdict.in_a_row, again,
            )  # fmt: skip
            reason = f"it ended {verdict.in_a_row} times in a row; the last time it {self.last_end}"
            self._become(CRASH_LOOP, reason)
        else:
            _log.error("%s %s: %s", self.name, self.last_end, again)
            self._become(RESTARTING, f"it {self.last_end}")
        return verdict.delay

    async def _sleep_unless_renewed(self, delay: float) -> None:
        renewal = asyncio.create_task(self._renewal.wait())
        try:
            await asyncio.wait({renewal}, timeout=delay)
            if renewal.done():
                self._policy.forget()
                self._become(RESTARTING, "an operator has it started again")
        finally:
            await cancel(renewal)
