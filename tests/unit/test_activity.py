"""Idle, busy or stuck, from any order of steps and work."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.services.executor.step_timeout import StepTimeout
from triptych.services.runtime.activity import Seen, Watch
from triptych.v1 import stage_pb2

IDLE, BUSY, STUCK = (
    stage_pb2.ACTIVITY_IDLE,
    stage_pb2.ACTIVITY_BUSY,
    stage_pb2.ACTIVITY_STUCK,
)


def test_who_knows_steps_only() -> None:
    watch = Watch(10.0)
    assert watch.at(5.0) == Seen(IDLE, 0.0, 0.0)
    watch.step_began(6.0)
    assert watch.at(9.0) == Seen(BUSY, 3.0, 3.0)
    assert watch.at(16.0) == Seen(BUSY, 10.0, 10.0)
    assert watch.at(16.5) == Seen(STUCK, 10.5, 10.5)
    watch.step_ended(17.0)
    assert watch.at(99.0) == Seen(IDLE, 0.0, 0.0)


def test_work_that_waits_without_a_step_is_stuck_at_last() -> None:
    watch = Watch(10.0)
    watch.work(True, 5.0)
    watch.work(True, 14.0)  # is no progress
    assert watch.at(14.0) == Seen(BUSY, 0.0, 9.0)
    assert watch.at(16.0) == Seen(STUCK, 0.0, 11.0)
    watch.step_began(20.0)
    assert watch.at(21.0) == Seen(STUCK, 1.0, 16.0)
    watch.step_ended(22.0)
    assert watch.at(23.0) == Seen(BUSY, 0.0, 1.0)
    watch.work(False, 24.0)
    assert watch.at(99.0).activity == IDLE


def test_lost_steps_are_no_progress() -> None:
    watch = Watch(10.0)
    watch.work(True, 0.0)
    watch.step_began(1.0)
    watch.step_began(2.0)
    assert [watch.oldest_step] == [1.0]
    watch.step_ended(5.0)
    assert watch.at(6.0) == Seen(BUSY, 1.0, 1.0)  # it could not begin before the other ended
    watch.steps_lost()
    assert [watch.oldest_step] == [None]
    assert watch.at(16.0) == Seen(STUCK, 0.0, 11.0)


def test_milliseconds_as_messages_carry_them() -> None:
    seen = Seen(BUSY, 1.2345, 6.7)
    assert (seen.step_age_ms, seen.progress_age_ms) == (1234, 6700)


_EVENTS = st.lists(
    st.tuples(st.sampled_from(["began", "ended", "lost", "work", "no work"]), st.floats(0.0, 20.0)),
    max_size=60,
)


@given(_EVENTS)
def test_any_order_of_events(events: list[tuple[str, float]]) -> None:
    watch, now = Watch(10.0), 0.0
    begun: list[float] = []
    waits, progress = False, 0.0
    for event, later in events:
        now += later
        idle = not begun and not waits
        match event:
            case "began":
                watch.step_began(now)
                begun.append(now)
                progress = now if idle else progress
            case "ended" if begun:
                watch.step_ended(now)
                begun = [now, *begun[2:]] if len(begun) > 1 else []
                progress = now
            case "lost":
                watch.steps_lost()
                begun.clear()
            case "work" | "no work":
                waits = event == "work"
                watch.work(waits, now)
                progress = now if idle and waits else progress
        seen = watch.at(now + 5.0)
        assert (seen.activity == IDLE) == (not begun and not waits)
        assert seen.step_age == (now + 5.0 - begun[0] if begun else 0.0)
        if seen.activity != IDLE:
            assert seen.progress_age == pytest.approx(now + 5.0 - progress)
            assert seen.stuck == (seen.progress_age > 10.0)


def test_a_step_that_hangs_is_found_and_others_are_not() -> None:
    timeout = StepTimeout(3.0, 0.0)
    assert [timeout.passed(0.0, at / 2) for at in range(1, 7)] == [None] * 6
    assert timeout.passed(0.0, 4.0) is not None
    assert timeout.passed(4.0, 4.5) is None  # the next step
    assert timeout.passed(None, 90.0) is None
    assert timeout.passed(None, 91.0) is None


def test_time_in_which_the_process_did_not_run_does_not_count() -> None:
    timeout = StepTimeout(3.0, 0.0)
    assert timeout.passed(0.0, 1.0) is None
    assert timeout.passed(0.0, 500.0) is None  # frozen until now
    assert timeout.passed(0.0, 500.5) is None
    assert timeout.passed(0.0, 502.0) is None
    assert timeout.passed(0.0, 503.0) is not None
