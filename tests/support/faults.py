"""An engine that is disturbed while it answers, and whether anybody was told anything else for it.

The reference is the same mix of requests on the same engine, undisturbed.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TypeVar

import grpc

from engine import Engine, alive, is_serving, running_engine
from fault_asks import TIMEOUT, Ask, Door, Said, Seen, first_difference
from fault_figures import Figures
from fault_mix import ENGINE, Mixer, fault_model
from grpc_errors import as_error
from triptych.services.runtime.run_dir import RunDir
from triptych.v1 import control_pb2

_KEPT = (control_pb2.StageState.STATE_READY, control_pb2.StageState.STATE_CRASH_LOOP)
_T = TypeVar("_T")
BACK = 60.0
"""Seconds within which a stage must be back; a bound for waits, not a claim."""
QUICK_BEATS = ("--heartbeat-interval", "0.2", "--heartbeat-timeout", "1.5")
"""For engines whose stages freeze."""
KILLED_OFTEN = ("--restart-window", "0", "--max-restarts", "1000")
"""For engines whose stages are killed again and again, which would be a crash loop."""


@dataclass
class Scene:
    """A mix under way, as whoever disturbs it sees it."""

    bench: "Bench"
    mix: Sequence[Ask]
    source: Random
    expected_messages: int
    seconds: float
    seen: Seen = field(default_factory=Seen)
    open_requests: Callable[[], int] = lambda: 0
    unfinished: int = 0
    """Requests that were open when it was disturbed last."""

    @property
    def engine(self) -> Engine:
        return self.bench.engine

    def kill(self, *names: str, sig: signal.Signals = signal.SIGKILL) -> list[int]:
        """Send a signal to stages, one right after the other; their pids."""
        self.unfinished = self.open_requests()
        return self.bench.kill(*names, sig=sig)


Undisturbed = tuple[list[Said], int, float, int]
"""Answers, messages, seconds, and the prompt tokens of all."""
Disturb = Callable[[Scene], None]
Moment = Callable[[Scene], None]


def at_submission(scene: Scene) -> None:
    """While the requests arrive."""
    time.sleep(scene.source.random() * 0.1 * scene.seconds)


def in_prefill(scene: Scene) -> None:
    """After a random part of the prompts has been computed."""
    wanted = scene.source.random() * 0.7
    limit = time.monotonic() + TIMEOUT
    before = scene.bench.prompt_tokens_before
    while time.monotonic() < limit:
        done = scene.engine.stats("scheduler").scheduler.prompt_tokens_total - before
        if done > wanted * scene.bench.prompt_tokens_of_a_mix:
            return
        time.sleep(0.001)
    raise AssertionError("no prompt is computed")


def in_decode(scene: Scene) -> None:
    """After a random part of the tokens has come."""
    scene.seen.wait(int(scene.expected_messages * scene.source.uniform(0.05, 0.7)))


def at_the_first_token(scene: Scene) -> None:
    scene.seen.wait(1)


def any_time(scene: Scene) -> None:
    time.sleep(scene.source.random() * scene.seconds)


def killing(*names: str, at: Moment = any_time) -> Disturb:
    """SIGKILL to these stages, at the same instant."""

    def disturb(scene: Scene) -> None:
        at(scene)
        scene.kill(*names)

    return disturb


def killing_in_a_row(name: str, times: int) -> Disturb:
    """SIGKILL to a stage, and to the one that takes its place, while it starts or while it works.

    Not while requests are on trial for the death before: a further one would speak against them.
    """

    def disturb(scene: Scene) -> None:
        any_time(scene)
        for _ in range(times):
            (pid,) = scene.kill(name)
            scene.bench.successor(name, pid)
            if scene.source.random() < 0.6:
                wait_for(scene.bench.nobody_on_trial, "the trials do not end")
                time.sleep(scene.source.random() * 0.3 * scene.seconds)

    return disturb


MOMENTS: tuple[Moment, ...] = (at_submission, in_prefill, at_the_first_token, in_decode, any_time)


class Bench:
    """An engine, a client's door to it, and mixes to disturb."""

    def __init__(self, engine: Engine, model: Path, seed: int) -> None:
        self.engine = engine
        self.model = model
        self.run_dir = RunDir.open(engine.run_dir)
        self.door = Door(engine.address, engine.http_address)
        self.mixer = Mixer(seed)
        self.source = Random(seed)
        self.prompt_tokens_before = 0
        self.prompt_tokens_of_a_mix = 0
        self.figures = Figures(engine)
        self.mixes = 3
        """How many there are at most."""
        self._mixes: list[list[Ask]] = []
        self._turn = 0
        self._known: dict[int, tuple[Sequence[Ask], Undisturbed]] = {}  # the mix itself: ids last

    def close(self) -> None:
        self.door.close()

    def pid(self, name: str) -> int:
        """Of the process that holds a stage's role now, ready or not; waits for one."""
        return wait_for(lambda: self.holder(name), f"{name} is not there")

    def holder(self, name: str) -> int | None:
        if not self.run_dir.held(name):
            return None
        text = (self.engine.run_dir / f"{name}.lock").read_text().strip()
        return int(text) if text and alive(int(text)) else None

    def successor(self, name: str, pid: int) -> int:
        """Of the process that takes the place of one that has ended; waits for it."""

        def found() -> int | None:
            now = self.holder(name)
            return now if now != pid else None

        return wait_for(found, f"{name} is not started again")

    def kill(self, *names: str, sig: signal.Signals = signal.SIGKILL) -> list[int]:
        """Send a signal to stages, one right after the other; their pids."""
        pids = [self.pid(name) for name in names]
        for pid in pids:
            os.kill(pid, sig)
        return pids

    @contextmanager
    def nobody_starts_anything(self) -> Iterator[None]:
        """Within, the supervisor is frozen, so that what has died stays away."""
        pid = self.engine.process.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    # ------------------------------------------------------------------ running mixes

    def check(self, disturb: Disturb, mix: Sequence[Ask] | None = None) -> Scene:
        """Run a mix undisturbed and disturbed; everything must be the same, and be given back."""
        mix = self.mix() if mix is None else mix
        expected, scene = self.undisturbed(mix)
        got = self.disturbed(scene, disturb)
        differences = compare(mix, expected, got)
        assert not differences, "\n".join(differences)
        self.settled()
        return scene

    def check_midway(self, disturb: Disturb, mix: Sequence[Ask] | None = None) -> Scene:
        """As `check`, until it has come before the end: on a busy machine it may come too late."""
        for _ in range(5):
            if (scene := self.check(disturb, mix)).unfinished > 0:
                return scene
        raise AssertionError("it came too late each time")

    @contextmanager
    def midway(self, count: int) -> Iterator[None]:
        """Within, the executor is frozen in the middle of so many choices, which cannot end."""
        with self.engine.frozen():
            time.sleep(0.05)  # the last of what it has said arrives
            tracked = self.engine.stats("scheduler").scheduler.requests_tracked
            assert tracked >= count, "it came too late"
            yield

    def mix(self) -> list[Ask]:
        """One of every kind; the same few mixes in turn, so that each runs undisturbed once."""
        if len(self._mixes) < self.mixes:
            self._mixes.append(self.mixer.mix())
        mix = self._mixes[self._turn % len(self._mixes)]
        self._turn += 1
        return mix

    def undisturbed(self, mix: Sequence[Ask]) -> tuple[list[Said], Scene]:
        """What the requests are told where nothing happens, and the scene for the second time."""
        if id(mix) not in self._known:
            self._known[id(mix)] = (mix, self._run_undisturbed(mix))
        _, (answers, messages, seconds, self.prompt_tokens_of_a_mix) = self._known[id(mix)]
        self.engine.flush_cache()  # so that there are prompts to compute the second time
        self.figures.note()
        return answers, Scene(self, mix, self.source, messages, seconds)

    def _run_undisturbed(self, mix: Sequence[Ask]) -> Undisturbed:
        self.engine.flush_cache()
        before = self._prompt_tokens()
        seen, started = Seen(), time.monotonic()
        with self.sent(mix, seen) as futures:
            answers = [future() for future in futures]
        seconds = time.monotonic() - started
        failed = compare(mix, answers, answers)
        assert not failed, "\n".join(["undisturbed:", *failed])
        return answers, seen.total, seconds, self._prompt_tokens() - before

    def disturbed(self, scene: Scene, disturb: Disturb) -> list[Said]:
        self.prompt_tokens_before = self._prompt_tokens()
        with self.sent(scene.mix, scene.seen) as futures:
            scene.open_requests = lambda: sum(not future.done() for future in futures)
            disturb(scene)
            return [future() for future in futures]

    @contextmanager
    def sent(
        self, mix: Sequence[Ask], seen: Seen, door: Door | None = None
    ) -> Iterator[list["Sent"]]:
        """A mix, all at once, each by a client of its own."""
        ready = threading.Barrier(len(mix) + 1)
        with ThreadPoolExecutor(len(mix)) as pool:
            sent = [Sent(pool, ask, door or self.door, seen, ready) for ask in mix]
            ready.wait(TIMEOUT)
            yield sent

    def _prompt_tokens(self) -> int:
        return self.engine.stats("scheduler").scheduler.prompt_tokens_total

    # ------------------------------------------------------------------ afterwards

    def serving(self) -> None:
        """Wait until tokens can be made."""
        wait_for(lambda: is_serving(self.door.address) or None, "it does not serve again")

    def settled(self) -> None:
        """Wait until all stages are there, and check that all that was lent has come back."""
        self.serving()
        names = self.engine.names
        wait_for(lambda: all(map(self._answers, names)) or None, "a stage does not answer")
        wait_for(lambda: self.all_kept() or None, "the supervisor has not noticed")
        self.figures.check()

    def all_kept(self) -> bool:
        """Whether the supervisor has all stages ready, or has seen one end too often lately."""
        stages = self.engine.stats("supervisor").supervisor.stages
        return all(stage.state in _KEPT for stage in stages)

    def nobody_on_trial(self) -> bool | None:
        """Whether the scheduler has an executor, and suspects no request; None for no."""
        try:
            scheduler = self.engine.stats("scheduler").scheduler
        except grpc.RpcError:
            return None
        return (scheduler.executor_ready and scheduler.choices_suspected == 0) or None

    def _answers(self, name: str) -> bool:
        try:
            return self.engine.pid(name) == self.holder(name)
        except grpc.RpcError:
            return False


class Sent:
    """A request under way. Calling it waits for what it was told; an error is told as one."""

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        ask: Ask,
        door: Door,
        seen: Seen,
        ready: threading.Barrier,
    ) -> None:
        def run() -> Said:
            ready.wait(TIMEOUT)
            try:
                return ask.run(door, seen)
            except Exception as error:
                return {"error": error}

        self._future = pool.submit(run)

    def done(self) -> bool:
        return self._future.done()

    def __call__(self) -> Said:
        return self._future.result(2 * TIMEOUT)


def compare(mix: Sequence[Ask], expected: Sequence[Said], got: Sequence[Said]) -> list[str]:
    """The requests that were told something else, in words."""
    differences = []
    for ask, one, other in zip(mix, expected, got, strict=True):
        if "error" in other:
            differences.append(f"{ask.name}: {_in_words(other['error'])}")
        elif (what := first_difference(one, other)) is not None:
            differences.append(f"{ask.name}: {what}")
    return differences


def _in_words(error: object) -> str:
    if isinstance(error, grpc.RpcError):
        return f"{as_error(error).code().name}: {as_error(error).details()}"
    return repr(error)[:400]


def wait_for(condition: Callable[[], _T | None], otherwise: str, seconds: float = BACK) -> _T:
    """The first result that is not None."""
    limit = time.monotonic() + seconds
    while (found := condition()) is None:
        assert time.monotonic() < limit, f"{otherwise} after {seconds:g} s"
        time.sleep(0.01)
    return found


@contextmanager
def running_bench(folder: Path, *flags: str, seed: int = 1) -> Iterator[Bench]:
    """An engine of `fault_model` in `folder`, with a bench around it."""
    model = fault_model(folder)
    with running_engine(model, folder / "run", *ENGINE, *flags) as engine:
        bench = Bench(engine, model, seed)
        # A stage that is killed before ends the start, or comes back at another free port.
        wait_for(lambda: bench.all_kept() or None, "the start does not come to its end")
        wait_for(lambda: b"is ready" in engine.log.read_bytes() or None, "it does not say so")
        try:
            yield bench
        finally:
            bench.close()


def errors_among(
    mix: Sequence[Ask], expected: Sequence[Said], got: Sequence[Said]
) -> list[tuple[str, object]]:
    """Who ended with an error, and which; everybody else must have been told what was expected."""
    errors = []
    for ask, one, other in zip(mix, expected, got, strict=True):
        if "error" in other:
            errors.append((ask.name, other["error"]))
        else:
            assert first_difference(one, other) is None, ask.name
    return errors


@contextmanager
def killed(what: str, code: int = -signal.SIGKILL) -> Iterator[None]:
    """Within, a process ends with that code, which `what` names when it is told."""
    try:
        yield
    except AssertionError as error:
        if f"{what} ended with {code}" not in str(error):
            raise
        return
    raise AssertionError(f"{what} did not end with {code}")
