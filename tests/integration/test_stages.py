"""What becomes of a supervised process that fails again and again, falls silent, or is renewed."""

import asyncio
import errno
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from stub_children import QUICK, WAIT, gone, lives, stopped, stub_spec, supervise, until
from triptych.services.cli.child import Child
from triptych.services.cli.restart_policy import RestartRules
from triptych.services.cli.stage import CRASH_LOOP, READY, STARTING, STOPPED
from triptych.services.cli.supervisor import Busy, Supervisor

_TWICE = RestartRules(max_restarts=3, first_delay=0.01, longest_delay=0.05, window=0.2)


def test_a_crash_loop_has_a_reason_is_tried_again_and_ends(tmp_path: Path) -> None:
    seen: list[str] = []

    async def loop(supervisor: Supervisor, stop: asyncio.Event) -> None:
        stage = supervisor.stage("a")
        await asyncio.sleep(2 * _TWICE.window)  # the first end is one of a process that was well
        os.kill(supervisor.pids["a"], signal.SIGKILL)
        await until(lambda: stage.state == CRASH_LOOP and lives(tmp_path, "a") > 6)
        assert "the last time it exited with code 3: told to" in stage.reason
        assert supervisor.stage("b").state == READY
        (tmp_path / "mended").touch()
        await until(lambda: stage.state == READY)
        assert (stage.reason, stage.restarts_total) == ("", lives(tmp_path, "a") - 1)
        assert stage.last_end == "exited with code 3: told to"
        stop.set()

    limits = replace(QUICK, restarts=_TWICE)
    assert supervise(tmp_path, {"a": "brief", "b": "run"}, loop, limits, seen) == 0
    assert [line for line in seen if line.startswith("a")][:6] == [
        "a STARTING it starts",
        "a READY",
        "a RESTARTING it was killed by SIGKILL",
        "a RESTARTING it exited with code 3: told to",
        "a CRASH_LOOP it ended 3 times in a row; the last time it exited with code 3: told to",
        "a CRASH_LOOP it ended 4 times in a row; the last time it exited with code 3: told to",
    ]


def test_a_child_that_falls_silent_is_killed_and_started_again(tmp_path: Path) -> None:
    async def freeze(supervisor: Supervisor, stop: asyncio.Event) -> None:
        stage, other = supervisor.stage("a"), supervisor.pids["b"]
        os.kill(supervisor.pids["a"], signal.SIGSTOP)
        await until(lambda: stage.restarts_total == 1 and stage.state == READY)
        assert stage.last_end == "gave no answer for 3 s"
        assert supervisor.pids["b"] == other
        stop.set()

    limits = replace(QUICK, heartbeat_timeout=3.0)
    assert supervise(tmp_path, {"a": "run", "b": "run"}, freeze, limits) == 0


def test_a_child_that_is_frozen_while_it_starts_is_found_too(tmp_path: Path) -> None:
    async def freeze(supervisor: Supervisor, stop: asyncio.Event) -> None:
        stage = supervisor.stage("a")
        os.kill(supervisor.pids["a"], signal.SIGKILL)
        await until(lambda: lives(tmp_path, "a") == 2)
        os.kill(supervisor.pids["a"], signal.SIGSTOP)
        await until(lambda: stage.restarts_total == 2)
        assert stage.last_end == "gave no answer for 6 s"
        stop.set()

    limits = replace(QUICK, heartbeat_timeout=2.0)
    assert supervise(tmp_path, {"a": "late"}, freeze, limits) == 0


def test_a_restart_that_never_gets_ready_is_an_end(tmp_path: Path) -> None:
    async def kill(supervisor: Supervisor, stop: asyncio.Event) -> None:
        stage = supervisor.stage("a")
        os.kill(supervisor.pids["a"], signal.SIGKILL)
        await until(lambda: stage.state == CRASH_LOOP)
        assert "was not ready after 3 s" in stage.reason
        stop.set()

    limits = replace(QUICK, startup_timeout=3.0, restarts=replace(QUICK.restarts, max_restarts=3))
    assert supervise(tmp_path, {"a": "late"}, kill, limits) == 0


def test_what_cannot_be_started_is_tried_again(tmp_path: Path) -> None:
    """A machine out of memory or processes: here its program is missing."""

    async def kill(supervisor: Supervisor, stop: asyncio.Event) -> None:
        stage, other, good = supervisor.stage("a"), supervisor.pids["b"], supervisor.stage("a").spec
        supervisor.replace_spec(replace(good, command=(str(tmp_path / "gone"),)))
        os.kill(supervisor.pids["a"], signal.SIGKILL)
        await until(lambda: stage.state == CRASH_LOOP)
        assert "the last time it could not be started: " in stage.reason
        assert supervisor.pids == {"b": other}
        supervisor.replace_spec(good)
        assert await stage.renew() is None
        assert lives(tmp_path, "a") == 2
        stop.set()

    limits = replace(QUICK, restarts=replace(QUICK.restarts, longest_delay=0.05))
    assert supervise(tmp_path, {"a": "run", "b": "run"}, kill, limits) == 0


def test_what_cannot_be_followed_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptor is free. On its own it would hold its role's lock, and all that follow fail."""
    pids: list[int] = []

    def none_is_free(pid: int) -> int:
        pids.append(pid)
        raise OSError(errno.EMFILE, "Too many open files")

    async def main() -> None:
        with pytest.raises(OSError, match="Too many open files"):
            Child(stub_spec(tmp_path, "a"))

    monkeypatch.setattr(os, "pidfd_open", none_is_free)
    asyncio.run(main())
    (pid,) = pids
    assert gone(pid)


def test_others_that_cannot_be_started_leave_those_of_before(tmp_path: Path) -> None:
    async def load(supervisor: Supervisor, stop: asyncio.Event) -> None:
        before = [supervisor.stage(name).spec for name in "ab"]
        wanted = [replace(spec, command=("x" * 200_000,)) for spec in before]
        failure = await supervisor.start_anew(wanted)
        assert failure is not None
        assert failure.startswith("a cannot be started: ")
        assert supervisor.pids == {}
        for spec in before:
            supervisor.replace_spec(spec)
        supervisor.keep_all()
        await until(lambda: all(supervisor.stage(name).state == READY for name in "ab"))
        stop.set()

    assert supervise(tmp_path, {"a": "run", "b": "run"}, load) == 0


def test_a_stop_in_a_crash_loop_or_between_two_lives(tmp_path: Path) -> None:
    async def kill(supervisor: Supervisor, stop: asyncio.Event) -> None:
        os.kill(supervisor.pids["a"], signal.SIGKILL)
        await until(lambda: lives(tmp_path, "a") == 2 and not supervisor.stage("a").pid)
        stop.set()

    slow = replace(QUICK, restarts=replace(QUICK.restarts, first_delay=60.0, longest_delay=60.0))
    assert supervise(tmp_path, {"a": "brief", "b": "run"}, kill, slow) == 0
    assert stopped(tmp_path) == ["b"]


def test_while_the_first_one_drains_the_others_are_kept_running(tmp_path: Path) -> None:
    async def stop_then_kill(supervisor: Supervisor, stop: asyncio.Event) -> None:
        async def kill() -> None:
            os.kill(supervisor.pids["b"], signal.SIGKILL)
            stage = supervisor.stage("b")
            await until(lambda: stage.restarts_total == 1 and stage.state == READY)
            os.kill(supervisor.pids["a"], signal.SIGKILL)  # it does not drain any longer

        tasks.append(asyncio.create_task(kill()))
        stop.set()

    tasks: list[asyncio.Task[None]] = []
    assert supervise(tmp_path, {"a": "stubborn", "b": "run"}, stop_then_kill) == 0
    assert tasks[0].result() is None
    assert lives(tmp_path, "b") == 2
    assert stopped(tmp_path) == ["b"]


def test_a_renewal_is_no_crash_and_cuts_a_delay_short(tmp_path: Path) -> None:
    async def renew(supervisor: Supervisor, stop: asyncio.Event) -> None:
        stage = supervisor.stage("a")
        for _ in range(4):
            before = stage.pid
            assert await stage.renew() is None
            assert stage.pid != before
            assert stage.state == READY
        assert stopped(tmp_path) == ["a"] * 4
        os.kill(supervisor.pids["a"], signal.SIGKILL)
        await until(lambda: stage.restarts_total == 5)
        os.kill(supervisor.pids["a"], signal.SIGKILL)  # that one waits for a minute
        await until(lambda: stage.pid == 0)
        assert await stage.renew() is None
        stop.set()

    rules = RestartRules(max_restarts=3, first_delay=60.0, longest_delay=60.0)
    assert supervise(tmp_path, {"a": "run"}, renew, replace(QUICK, restarts=rules)) == 0


def test_a_renewal_that_fails_says_how(tmp_path: Path) -> None:
    async def renew(supervisor: Supervisor, stop: asyncio.Event) -> None:
        assert await supervisor.stage("a").renew() == "exited with code 3: told to"
        stop.set()

    assert supervise(tmp_path, {"a": "brief"}, renew) == 0


def test_halt_and_start_again(tmp_path: Path) -> None:
    async def operate(supervisor: Supervisor, stop: asyncio.Event) -> None:
        stage, before = supervisor.stage("a"), supervisor.pids["a"]
        await supervisor.halt("a", "no longer wanted")
        assert gone(before)
        assert (stage.state, stage.reason, stage.pid) == (STOPPED, "no longer wanted", 0)
        assert await supervisor.start_again("a") is None
        assert stage.state == READY
        before = supervisor.pids["a"]
        os.kill(before, signal.SIGKILL)  # it is kept running
        await until(lambda: supervisor.pids.get("a", before) != before)
        stop.set()

    assert supervise(tmp_path, {"a": "run", "b": "run"}, operate) == 0


def test_what_cannot_start_again_stays_stopped(tmp_path: Path) -> None:
    async def operate(supervisor: Supervisor, stop: asyncio.Event) -> None:
        await supervisor.halt("a", "no longer wanted")
        assert await supervisor.start_again("a") == "a exited with code 3: told to"
        stage = supervisor.stage("a")
        assert (stage.state, stage.reason) == (STOPPED, "no longer wanted")
        stop.set()

    assert supervise(tmp_path, {"a": "brief", "b": "run"}, operate) == 0


def test_others_take_the_place_of_all(tmp_path: Path) -> None:
    async def operate(supervisor: Supervisor, stop: asyncio.Event) -> None:
        broken = [stub_spec(tmp_path, "a"), stub_spec(tmp_path, "b", "exit5")]
        assert await supervisor.start_anew(broken) == "b exited with code 5"
        well = [stub_spec(tmp_path, name) for name in ("a", "b")]
        assert await supervisor.start_anew(well) is None
        supervisor.keep_all()
        assert {stage.state for stage in supervisor.states().stages} == {READY}
        stop.set()

    assert supervise(tmp_path, {"a": "run", "b": "run"}, operate) == 0


def test_one_operation_at_a_time_and_none_after_the_stop(tmp_path: Path) -> None:
    async def operate(supervisor: Supervisor, stop: asyncio.Event) -> None:
        async def forever() -> None:
            await asyncio.sleep(3600)

        first = asyncio.create_task(supervisor.operate("the first", forever))
        await asyncio.sleep(0)
        with pytest.raises(Busy, match="the first is under way"):
            await supervisor.operate("the second", forever)
        tasks.append(first)
        stop.set()

    tasks: list[asyncio.Task[None]] = []
    assert supervise(tmp_path, {"a": "run"}, operate) == 0
    assert str(tasks[0].exception()) == "the engine stops"


def test_a_stop_ends_an_operation_that_has_replaced_half(tmp_path: Path) -> None:
    async def operate(supervisor: Supervisor, stop: asyncio.Event) -> None:
        slow = [stub_spec(tmp_path, "a"), stub_spec(tmp_path, "b", "slow")]
        work = supervisor.operate("replacement", lambda: supervisor.start_anew(slow))
        tasks.append(asyncio.create_task(work))
        await until(lambda: lives(tmp_path, "b") == 2)
        assert supervisor.stage("b").state == STARTING
        stop.set()

    tasks: list[asyncio.Task[str | None]] = []
    assert supervise(tmp_path, {"a": "run", "b": "run"}, operate) == 0
    assert isinstance(tasks[0].exception(), Busy)


def test_whoever_ends_because_another_did_is_in_no_crash_loop(tmp_path: Path) -> None:
    limits = replace(QUICK, restarts=RestartRules(max_restarts=2, window=60.0, longest_delay=WAIT))
    ends = 5

    async def drag(supervisor: Supervisor, stop: asyncio.Event) -> None:
        stage = supervisor.stage("a")
        for count in range(1, ends + 1):
            (tmp_path / "culprit").touch()
            await until(lambda: lives(tmp_path, "a") == count + 1)  # noqa: B023  # awaited here
            await until(lambda: stage.state == READY)
        assert stage.restarts_total == ends
        assert stage.last_end == "exited with code 71"
        stop.set()

    seen: list[str] = []
    assert supervise(tmp_path, {"a": "follow"}, drag, limits, seen) == 0
    assert not [line for line in seen if "CRASH_LOOP" in line]


def test_at_the_start_the_culprit_ends_the_engine(tmp_path: Path) -> None:
    assert supervise(tmp_path, {"a": "exit71", "b": "exit5"}) == 5


def test_children_of_one_service_are_operated_on_together(tmp_path: Path) -> None:
    async def operate(supervisor: Supervisor, stop: asyncio.Event) -> None:
        before = supervisor.pids
        assert await supervisor.renew("e-1") is None
        assert supervisor.pids["t"] == before["t"]
        assert not {before["e-0"], before["e-1"]} & {*supervisor.pids.values()}
        before = supervisor.pids
        await supervisor.halt("e-0", "no longer wanted")
        assert supervisor.pids == {"t": before["t"]}
        states = {stage.name: stage.state for stage in supervisor.states().stages}
        assert states == {"t": READY, "e-0": STOPPED, "e-1": STOPPED}
        assert await supervisor.start_again("e-0") is None
        assert len(supervisor.pids) == 3
        stop.set()

    assert supervise(tmp_path, {"t": "run", "e-0": "run", "e-1": "run"}, operate) == 0


def test_children_of_one_service_are_stopped_together(tmp_path: Path) -> None:
    """The first waits for the second."""
    assert supervise(tmp_path, {"e-0": "last", "e-1": "run"}) == 0
    assert stopped(tmp_path) == ["e-1", "e-0"]


def test_one_of_a_service_that_cannot_start_again_stops_all(tmp_path: Path) -> None:
    async def operate(supervisor: Supervisor, stop: asyncio.Event) -> None:
        await supervisor.halt("e-0", "no longer wanted")
        assert await supervisor.start_again("e-0") == "e-1 exited with code 3: told to"
        states = {(stage.state, stage.reason) for stage in supervisor.together("e-0")}
        assert states == {(STOPPED, "no longer wanted")}
        assert supervisor.pids == {}
        stop.set()

    assert supervise(tmp_path, {"e-0": "run", "e-1": "brief"}, operate) == 0
