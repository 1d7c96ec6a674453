"""Health says SERVING only while tokens can be made, and NOT_SERVING once a stage has died."""

import signal
import time
from collections.abc import Iterator

import pytest

from faults import KILLED_OFTEN, QUICK_BEATS, Bench, running_bench, wait_for
from health_truth import HealthTruth

pytestmark = pytest.mark.faults

MOUTHS = {"Check", "Watch", "HTTP"}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    flags = (*KILLED_OFTEN, *QUICK_BEATS)
    with running_bench(tmp_path_factory.mktemp("health"), *flags, seed=22) as bench:
        yield bench


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Silence tells it nothing within a test: a death must be known by itself."""
    flags = (*KILLED_OFTEN, "--heartbeat-interval", "0.2", "--heartbeat-timeout", "600")
    with running_bench(tmp_path_factory.mktemp("patient"), *flags, seed=23) as bench:
        yield bench


def disturb(
    bench: Bench, truth: HealthTruth, name: str, sig: signal.Signals
) -> tuple[float, float]:
    """A stage goes, health says so, and after a while that it is back. When it went, and when
    everybody knew."""

    def all_say(serving: bool) -> bool | None:
        return truth.now() == dict.fromkeys(MOUTHS, serving) or None

    wait_for(lambda: all_say(True), "it does not serve")
    before = time.monotonic()
    with bench.nobody_starts_anything():  # or it might be back before all have looked
        (pid,) = bench.kill(name, sig=sig)
        wait_for(lambda: all_say(False), "somebody has not noticed")
        known = time.monotonic()
    bench.successor(name, pid)
    wait_for(lambda: all_say(True), "it does not serve again")
    return before, known


def check(bench: Bench, name: str, sig: signal.Signals, rounds: range) -> None:
    with HealthTruth(bench.engine, bench.door).watching() as truth:
        gone = [disturb(bench, truth, name, sig) for _ in rounds]
        served = len(truth.probes)
        wait_for(lambda: len(truth.probes) > served + 3 or None, "no more probes")
    assert truth.lies(gone) == []
    bench.settled()


@pytest.mark.parametrize("name", ["executor-0", "scheduler", "tokenizer-0"])
def test_what_health_says_of_a_killed_stage_is_true(
    patient: Bench, name: str, rounds: range
) -> None:
    check(patient, name, signal.SIGKILL, rounds)


@pytest.mark.parametrize("name", ["executor-0", "scheduler"])  # a frozen tokenizer says nothing
def test_what_health_says_of_a_frozen_stage_is_true(bench: Bench, name: str, rounds: range) -> None:
    check(bench, name, signal.SIGSTOP, rounds)


def test_busy_is_not_stuck(bench: Bench) -> None:
    with HealthTruth(bench.engine, bench.door).watching() as truth:
        bench.check(lambda scene: None)
    assert [serving for _, serving in truth.said["Check"]] == [True]
    assert truth.lies([]) == []
