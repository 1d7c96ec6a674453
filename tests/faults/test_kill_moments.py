"""Executor or scheduler is killed at some moment: no token is lost, doubled or changed."""

import pytest

from faults import MOMENTS, Bench, Moment, any_time, killing

pytestmark = pytest.mark.faults


@pytest.mark.parametrize("name", ["executor-0", "scheduler"])
@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.__name__)
def test_killed(bench: Bench, name: str, moment: Moment, rounds: range) -> None:
    for _ in rounds:
        if moment is any_time:
            bench.check(killing(name, at=moment))
        else:
            bench.check_midway(killing(name, at=moment))
