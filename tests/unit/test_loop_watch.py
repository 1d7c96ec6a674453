"""services/scheduler/loop_watch.py: how old the step loop's snapshot is, and what that means."""

from triptych.services.runtime.activity import Seen
from triptych.services.scheduler.loop_watch import LoopWatch
from triptych.services.scheduler.stats import Snapshot
from triptych.v1 import control_pb2, stage_pb2


def snapshot(activity: stage_pb2.Activity.ValueType = stage_pb2.ACTIVITY_BUSY) -> Snapshot:
    return Snapshot(control_pb2.SchedulerStats(), Seen(activity, 0.25, 0.5), serving=True)


def test_a_new_snapshot_is_young() -> None:
    first = snapshot()
    watch = LoopWatch(first, 100.0)
    for tenth in range(1, 31):
        watch.look(first, 100 + tenth / 10)
    assert abs(watch.age - 3.0) < 1e-9
    watch.look(snapshot(), 103.1)
    assert watch.age == 0.0


def test_time_in_which_nothing_was_looked_at_hardly_counts() -> None:
    first = snapshot()
    watch = LoopWatch(first, 0.0)
    watch.look(first, 1_000_000.0)
    assert watch.age == 1.0
    watch.look(first, 1_000_000.1)
    assert abs(watch.age - 1.1) < 1e-6


def test_what_the_statistics_say() -> None:
    first = snapshot()
    watch = LoopWatch(first, 0.0)
    watch.look(first, 0.9)
    process = control_pb2.ProcessStats()
    watch.describe(process, timeout=1.0)
    assert process.activity == stage_pb2.ACTIVITY_BUSY
    assert (process.step_age_ms, process.progress_age_ms) == (250, 500)
    watch.look(first, 1.5)
    watch.describe(process, timeout=1.0)
    assert process.activity == stage_pb2.ACTIVITY_STUCK
    assert process.progress_age_ms == 2000
