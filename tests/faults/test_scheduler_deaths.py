"""The scheduler dies: tokenizers keep what they were given, and every stream goes on unchanged."""

import pytest

from faults import (
    MOMENTS,
    Bench,
    Moment,
    Scene,
    any_time,
    in_decode,
    killing,
    killing_in_a_row,
)

pytestmark = pytest.mark.faults


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.__name__)
def test_killed(bench: Bench, moment: Moment, rounds: range) -> None:
    for _ in rounds:
        scene = bench.check(killing("scheduler", at=moment))
        assert scene.unfinished > 0 or moment.__name__ == "any_time", "it came too late"


def test_killed_twice(bench: Bench, rounds: range) -> None:
    for _ in rounds:
        bench.check(killing_in_a_row("scheduler", 2))


def test_killed_together_with_the_executor(bench: Bench, rounds: range) -> None:
    for _ in rounds:
        bench.check(killing("scheduler", "executor-0", at=in_decode))


def test_killed_while_there_is_no_executor(bench: Bench, rounds: range) -> None:
    def disturb(scene: Scene) -> None:
        any_time(scene)
        (executor,) = scene.kill("executor-0")
        scene.kill("scheduler")
        # And the executor that says hello to the next one goes too.
        bench.successor("executor-0", executor)
        scene.kill("executor-0")

    for _ in rounds:
        bench.check(disturb)
