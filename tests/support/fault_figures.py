"""What every process of an engine holds, before a fault and after it."""

import time
import urllib.request
from dataclasses import dataclass

import psutil

from engine import Engine
from triptych.v1 import control_pb2

_SETTLE = 30.0
_CONNECTIONS = 2
"""Of clients and the supervisor: there or not when a process was looked at first. What every fault
leaves behind is more soon: the processes that survive see many."""


@dataclass(frozen=True)
class Held:
    """Of one process: descriptors that are open (without those to its children), rings mapped."""

    open_files: int
    ring_maps: int


class Figures:
    """Compares a process with itself before the fault, a new one with the first new one.

    A process that was started again is not forked, and holds other descriptors than the first.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._names = engine.names
        self._first = {name: engine.pid(name) for name in self._names}
        self._by_pid: dict[int, Held] = {}
        self._restarted: dict[str, Held] = {}

    def note(self) -> None:
        """Remember what each process holds, at rest."""
        self._at_rest()
        for name in self._names:
            pid, held = self._held(name)
            self._by_pid.setdefault(pid, held)
            if pid != self._first[name]:
                self._restarted.setdefault(name, held)

    def check(self) -> None:
        """At rest nothing is lent, and no process holds more than it may."""
        limit = time.monotonic() + _SETTLE
        while True:
            wrong = self._wrong()
            if not wrong:
                return
            assert time.monotonic() < limit, "\n".join(wrong)
            time.sleep(0.05)

    def _wrong(self) -> list[str]:
        wrong = []
        scheduler = self._at_rest()
        assert scheduler.requests_tracked == 0
        assert scheduler.kv_unused_slots == 0
        assert scheduler.grammars_running == scheduler.grammars_waiting == 0
        for name in self._names:
            pid, held = self._held(name)
            before = self._by_pid.get(pid)
            if before is None:
                before = self._restarted.setdefault(name, held)
            more = held.open_files - before.open_files
            if more > _CONNECTIONS or held.ring_maps != before.ring_maps:
                wrong.append(f"{name} holds {held}, before {before}")
        return wrong

    def _at_rest(self) -> control_pb2.SchedulerStats:
        # HTTP opens a moment after the engine is ready, and holds a file more from then on.
        with urllib.request.urlopen(f"http://{self._engine.http_address}/health") as answer:
            assert answer.status == 200
        return self._engine.wait_idle()

    def _held(self, name: str) -> tuple[int, Held]:
        process = self._engine.stats(name).process
        try:
            children = psutil.Process(process.pid).children()
        except psutil.NoSuchProcess:
            children = []
        # The tokenizer's children check grammars: a pipe to each and one from it.
        return process.pid, Held(process.open_files - 2 * len(children), process.ring_maps)
