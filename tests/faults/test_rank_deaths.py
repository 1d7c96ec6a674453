"""One of two ranks dies, or freezes: streams pause and go on, no token lost, doubled or changed.

On the emulated device, which is slow: long streams and long prompts only, with few tokens.
"""

import signal
from collections.abc import Iterator

import pytest

from fault_asks import Ask
from faults import (
    KILLED_OFTEN,
    QUICK_BEATS,
    Bench,
    Moment,
    Scene,
    any_time,
    in_decode,
    in_prefill,
    killing,
    killing_in_a_row,
    running_bench,
)

pytestmark = pytest.mark.faults

RANKS = ("executor-0", "executor-1")
TWO = (
    "--device", "emulated", "--tensor-parallel-size", "2", "--cudagraph-capture-sizes", "2,8",
)  # fmt: skip


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    flags = (*TWO, *KILLED_OFTEN, *QUICK_BEATS)
    with running_bench(tmp_path_factory.mktemp("ranks"), *flags, seed=3) as bench:
        yield bench


@pytest.fixture(scope="module")
def mix(two: Bench) -> list[Ask]:
    return [*two.mixer.streams(4, 40), *two.mixer.long_prompts(2, 12)]


@pytest.mark.parametrize("victim", RANKS)
@pytest.mark.parametrize("moment", [in_prefill, in_decode], ids=lambda moment: moment.__name__)
def test_killed(two: Bench, mix: list[Ask], victim: str, moment: Moment, rounds: range) -> None:
    (other,) = {*RANKS} - {victim}
    before, lost = 0, 0

    def kill(scene: Scene) -> None:
        nonlocal before, lost
        before = two.pid(other)
        lost = two.engine.stats("scheduler").scheduler.executors_lost_total
        killing(victim, at=moment)(scene)

    for _ in rounds:
        two.check_midway(kill, mix)
        assert two.pid(other) != before
        assert two.engine.stats("scheduler").scheduler.executors_lost_total == lost + 1
        assert "exited with code 71" in two.engine.stage(other).last_end


@pytest.mark.parametrize("victim", RANKS)
def test_killed_again_while_it_starts(two: Bench, mix: list[Ask], victim: str) -> None:
    """Before it has met the others, while it loads, or when it works again."""
    two.check(killing_in_a_row(victim, 2), mix)


def test_all_killed_at_once(two: Bench, mix: list[Ask]) -> None:
    two.check(killing(*RANKS, at=any_time), mix)


def test_killed_with_the_scheduler(two: Bench, mix: list[Ask]) -> None:
    two.check(killing("scheduler", "executor-1", at=in_decode), mix)


def test_the_scheduler_dies_alone(two: Bench, mix: list[Ask]) -> None:
    """Both ranks join the next one, with the weights that they have."""
    before = [two.pid(name) for name in RANKS]
    two.check(killing("scheduler", at=in_decode), mix)
    assert [two.pid(name) for name in RANKS] == before


def test_frozen(two: Bench, mix: list[Ask]) -> None:
    """The others hang in a sum that it does not come to."""

    def freeze(scene: Scene) -> None:
        in_decode(scene)
        two.kill("executor-1", sig=signal.SIGSTOP)

    two.check(freeze, mix)
    assert two.engine.stage("executor-1").last_end.startswith("gave no answer for 1.5 s")
