"""The scheduler dies: tokenizers keep what they were given, and every stream goes on unchanged."""

import pytest

from faults import (
    Bench,
    Scene,
    any_time,
    in_decode,
    killing,
    killing_in_a_row,
)

pytestmark = pytest.mark.faults


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
