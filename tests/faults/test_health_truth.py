"""Health says SERVING only while tokens can be made, and NOT_SERVING after a death."""

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


@pytest.mark.parametrize(
    ("name", "sig"),
    [
        ("executor-0", signal.SIGKILL), ("executor-0", signal.SIGSTOP),
        ("scheduler", signal.SIGKILL), ("scheduler", signal.SIGSTOP),
        ("tokenizer-0", signal.SIGKILL),  # a frozen one says nothing at all
    ],
)  # fmt: skip
def test_what_health_says_is_true(
    bench: Bench, name: str, sig: signal.Signals, rounds: range
) -> None:
    with HealthTruth(bench.engine, bench.door).watching() as truth:
        gone = [disturb(bench, truth, name, sig) for _ in rounds]
        served = len(truth.probes)
        wait_for(lambda: len(truth.probes) > served + 3 or None, "no more probes")
    assert truth.lies(gone) == []
    bench.settled()


def test_busy_is_not_stuck(bench: Bench) -> None:
    with HealthTruth(bench.engine, bench.door).watching() as truth:
        bench.check(lambda scene: None)
    assert [serving for _, serving in truth.said["Check"]] == [True]
    assert truth.lies([]) == []
