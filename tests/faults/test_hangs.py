"""A stage is there and does nothing, as a whole or one thread of it: it counts as dead then."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from engine import CONTROL_NAMES
from fault_asks import Seen
from faults import (
    KILLED_OFTEN,
    QUICK_BEATS,
    Bench,
    Scene,
    any_time,
    compare,
    in_decode,
    running_bench,
    wait_for,
)
from second_tokenizer import second_tokenizer
from stopped_threads import busiest_thread, can_stop_threads, hardest_worker, stopped_thread

pytestmark = pytest.mark.faults

STAGES = ("executor-0", "scheduler")
BEAT = 0.2
"""Seconds between heartbeats, as in QUICK_BEATS."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    flags = (*KILLED_OFTEN, *QUICK_BEATS, "--step-timeout", "1.5")
    with running_bench(tmp_path_factory.mktemp("hangs"), *flags, seed=21) as bench:
        yield bench


@pytest.mark.parametrize("name", STAGES)
def test_frozen(bench: Bench, name: str, rounds: range) -> None:
    def disturb(scene: Scene) -> None:
        in_decode(scene)
        (pid,) = scene.kill(name, sig=signal.SIGSTOP)
        bench.successor(name, pid)

    for _ in rounds:
        bench.check_midway(disturb)


@pytest.mark.parametrize("name", STAGES)
def test_frozen_while_it_starts(bench: Bench, name: str, rounds: range) -> None:
    """The one that takes the place of a dead one, before or just after it is ready."""

    def disturb(scene: Scene) -> None:
        in_decode(scene)
        (pid,) = scene.kill(name)
        pid = bench.successor(name, pid)
        time.sleep(scene.source.random() * 2 * BEAT)
        scene.kill(name, sig=signal.SIGSTOP)
        bench.successor(name, pid)

    for _ in rounds:
        bench.check(disturb)


@pytest.mark.parametrize("name", CONTROL_NAMES)
def test_frozen_for_a_moment(bench: Bench, name: str, rounds: range) -> None:
    """Shorter than the time-outs: nobody is killed for it."""

    def disturb(scene: Scene) -> None:
        any_time(scene)
        (pid,) = scene.kill(name, sig=signal.SIGSTOP)
        time.sleep(2 * BEAT)
        os.kill(pid, signal.SIGCONT)
        assert bench.pid(name) == pid

    for _ in rounds:
        bench.check(disturb)


def test_the_tokenizer_frozen(bench: Bench) -> None:
    """Its clients cannot be served; it is killed, and they are told so."""
    mix = bench.mixer.streams(4, tokens=900)
    bench.undisturbed(mix)
    with bench.sent(mix, seen := Seen()) as sent:
        seen.wait(50)
        with bench.midway(4):
            (pid,) = bench.kill("tokenizer-0", sig=signal.SIGSTOP)
        bench.successor("tokenizer-0", pid)
        assert all("error" in each() for each in sent)
    bench.settled()


def test_a_tokenizer_that_was_given_up_and_comes_back(bench: Bench, rounds: range) -> None:
    """Frozen for so long that the scheduler has forgotten it: all its streams go on."""
    with second_tokenizer(bench.engine, bench.model, *QUICK_BEATS) as door:
        pid = bench.pid("tokenizer-1")

        def connected(count: int) -> bool | None:
            stats = bench.engine.stats("scheduler").scheduler
            return stats.tokenizers_connected == count or None

        for _ in rounds:
            mix = bench.mix()
            expected, scene = bench.undisturbed(mix)
            wait_for(lambda: connected(2), "the second tokenizer is not there")
            with bench.sent(mix, scene.seen, door) as sent:
                scene.seen.wait(scene.expected_messages // 4)
                os.kill(pid, signal.SIGSTOP)
                wait_for(lambda: connected(1), "it is not given up")
                os.kill(pid, signal.SIGCONT)
                got = [each() for each in sent]
            assert compare(mix, expected, got) == []
            wait_for(lambda: connected(2), "the second tokenizer is not there again")
    bench.settled()


@pytest.fixture(scope="module")
def stoppable() -> None:
    """A hang without a hook in the product is one thread stopped by ptrace."""
    if not can_stop_threads():
        pytest.skip("ptrace is refused here")  # by seccomp in some containers, or by Yama


def killed_or_moving(scene: Scene, name: str, pid: int) -> bool | None:
    """Whether the process is gone, or clients are sent something; None for no. Who was busiest may
    have been another thread than the one that computes: then the work goes on."""
    before = scene.seen.total
    time.sleep(0.5)
    moving = scene.seen.total != before or not scene.open_requests()
    return moving or scene.bench.holder(name) != pid or None


@pytest.mark.usefixtures("stoppable")
def test_hung_between_two_steps(bench: Bench) -> None:
    """The thread that computes never takes the next step: none is too long, and none is made."""
    mix = bench.mixer.streams(6)
    expected, scene = bench.undisturbed(mix)
    pid = bench.pid("executor-0")
    with stopped_thread(hardest_worker(pid)), bench.sent(mix, scene.seen) as sent:
        bench.successor("executor-0", pid)
        got = [each() for each in sent]
    assert compare(mix, expected, got) == []
    bench.settled()


@pytest.mark.usefixtures("stoppable")
@pytest.mark.parametrize("name", STAGES)
def test_hung(bench: Bench, name: str, rounds: range) -> None:
    """One thread never comes back, the one that computes; the others go on."""

    def disturb(scene: Scene) -> None:
        scene.seen.wait(1)
        pid = bench.pid(name)
        while (unfinished := scene.open_requests()) and not scene.unfinished:
            ended = suppress(FileNotFoundError, ProcessLookupError)  # the thread, or all of them
            with ended, stopped_thread(busiest_thread(pid)):
                wait_for(lambda: killed_or_moving(scene, name, pid), "nobody notices")
            if bench.holder(name) != pid:
                scene.unfinished = unfinished
                bench.successor(name, pid)

    for _ in rounds:
        # Not where the streams end before the right thread is found.
        assert any(bench.check(disturb).unfinished > 0 for _ in range(8))


@pytest.mark.usefixtures("stoppable")
def test_a_hung_stage_that_comes_back(bench: Bench) -> None:
    """A thread that stands still for less than the time-out."""

    def disturb(scene: Scene) -> None:
        scene.seen.wait(1)
        pids = [bench.pid(name) for name in STAGES]
        for pid in pids:
            with stopped_thread(busiest_thread(pid)):
                time.sleep(2 * BEAT)
        assert [bench.pid(name) for name in STAGES] == pids

    bench.check(disturb)
