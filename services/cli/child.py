"""One supervised process: how it is started, watched through a pidfd, and stopped."""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
from dataclasses import dataclass
from typing import Protocol

from triptych.services.runtime.lifecycle import EXIT_GROUP

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A process to supervise. The command makes it bind itself to us (`bind_to_parent`)."""

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ChildExit:
    """How a child ended: `code` is its exit code, or minus the signal that killed it."""

    name: str
    pid: int
    code: int

    @property
    def how(self) -> str:
        """The rest of a sentence that begins with its name."""
        if self.code < 0:
            return f"was killed by {signal.Signals(-self.code).name}"
        return f"exited with code {self.code}"

    @property
    def dragged(self) -> bool:
        """Whether it ended only because another process had, with which it works."""
        return self.code == EXIT_GROUP

    def __str__(self) -> str:
        return f"{self.name} {self.how}"


class Process(Protocol):
    """A child of ours, however it came about."""

    @property
    def pid(self) -> int:
        """Its process id."""

    def wait(self) -> int:
        """Reap it: its exit code, or minus the signal that killed it."""


class Forked:
    """A child that was forked, as Popen shows those it starts."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self) -> int:
        """As a process's."""
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)


def _popen(spec: ChildSpec) -> Process:
    return subprocess.Popen(spec.command, stdin=subprocess.DEVNULL, start_new_session=True)


class Child:
    """A running process in a session of its own, so that a terminal's Ctrl-C does not reach it.

    Create it on the event loop's thread, which must be the main thread: the child's bond to its
    parent is to the thread that started it.
    """

    def __init__(self, spec: ChildSpec, forked: int | None = None) -> None:
        """Start it; `forked` is the pid of a child of ours that runs already (`fork_child`). Raises
        OSError, and then none runs."""
        self.spec = spec
        self._process = _popen(spec) if forked is None else Forked(forked)
        self.pid = self._process.pid
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:  # no descriptor is free: nobody could follow it
            os.kill(self.pid, signal.SIGKILL)  # not reaped yet: the number is still its own
            self._process.wait()
            raise
        self._loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[ChildExit] = self._loop.create_future()
        self._loop.add_reader(self._pidfd, self._reap)
        _log.debug("started %s", spec.name, extra={"pid": self.pid})

    @property
    def running(self) -> bool:
        """Whether it has not been seen to end."""
        return not self._exited.done()

    async def exited(self) -> ChildExit:
        """Wait for its end. Safe to cancel and to await many times."""
        return await asyncio.shield(self._exited)

    async def stop(self, grace: float) -> None:
        """SIGTERM, and SIGKILL when it still runs after `grace` seconds. Nothing when it ended."""
        if self.running:
            signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)
            done, _ = await asyncio.wait({self._exited}, timeout=grace)
            if not done:
                _log.warning("%s did not stop in time: killed", self.spec.name, extra={"s": grace})
        await self.kill()

    async def kill(self) -> None:
        """SIGKILL it and whatever else lives in its session; wait until it is gone."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):  # just forked: in our session still
                os.killpg(self.pid, signal.SIGKILL)  # not reaped yet: the number is still its own
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        await self.exited()

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        # What it started does not outlive it. Not reaped yet: the number is still its own.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._exited.set_result(ChildExit(self.spec.name, self.pid, self._process.wait()))
