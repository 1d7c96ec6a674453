"""The executor dies: its streams pause and go on, no token lost, doubled or changed."""

import pytest

from faults import (
    Bench,
    in_decode,
    killing,
    killing_in_a_row,
)

pytestmark = pytest.mark.faults


def test_killed_again_and_again(bench: Bench, rounds: range) -> None:
    for _ in rounds:
        bench.check(killing_in_a_row("executor-0", 3))


def test_no_request_is_to_blame(bench: Bench) -> None:
    """Not even one that ran alone when the executor was killed."""
    before = bench.engine.stats("scheduler").scheduler
    bench.check(killing("executor-0", at=in_decode), bench.mixer.streams(1))
    after = bench.engine.stats("scheduler").scheduler
    assert after.executors_lost_total == before.executors_lost_total + 1
    assert after.choices_fatal_total == before.choices_fatal_total
