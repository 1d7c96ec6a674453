"""Watches the step loop from the event loop: health, and the end of a loop that hangs."""

import asyncio
import time
from collections.abc import Callable

from triptych.services.runtime.last_words import end_hung
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.runtime.run_dir import RunDir
from triptych.services.runtime.silence import ListeningClock
from triptych.services.scheduler.settings import SchedulerSettings
from triptych.services.scheduler.stats import Snapshot
from triptych.v1 import control_pb2, stage_pb2

_LOOK_SECONDS = 0.1
_LONGEST_LOOK = 1.0
"""Seconds that one look counts for at most: the time in which all of the process stood still, or
was kept from running, is not the step loop's."""


class LoopWatch:
    """How old the step loop's latest snapshot is. Used on the event loop; `now` is monotonic.

    The loop takes one at least every heartbeat_interval, whatever happens beside it.
    """

    def __init__(self, snapshot: Snapshot, now: float) -> None:
        self._clock = ListeningClock(_LONGEST_LOOK, now)
        self._snapshot = snapshot
        self._since = self._clock.at(now)
        self.age = 0.0

    def look(self, snapshot: Snapshot, now: float) -> None:
        """The latest snapshot; to be called often."""
        looked = self._clock.at(now)
        if snapshot is not self._snapshot:
            self._snapshot, self._since = snapshot, looked
        self.age = looked - self._since

    def describe(self, process: control_pb2.ProcessStats, timeout: float) -> None:
        """What the scheduler does, into the statistics of its process. A loop without a turn for
        `timeout` seconds is stuck in one."""
        seen, age_ms = self._snapshot.seen, int(self.age * 1000)
        process.activity = seen.activity
        process.step_age_ms, process.progress_age_ms = seen.step_age_ms, seen.progress_age_ms
        if self.age > timeout:
            process.activity = stage_pb2.ACTIVITY_STUCK
            process.progress_age_ms += age_ms


async def watch_loop(
    latest: Callable[[], Snapshot],
    watch: LoopWatch,
    settings: SchedulerSettings,
    set_serving: Callable[[bool], None],
    run_dir: RunDir,
) -> None:
    """Until cancelled. SERVING while steps can be made and the step loop takes its turns; one that
    takes none for `step_timeout` takes the process with it.

    Raises StartupError when the run directory has been removed: the next scheduler makes another
    one, in which all others look for it.
    """
    while not run_dir.removed("scheduler"):
        snapshot = latest()
        watch.look(snapshot, time.monotonic())
        set_serving(snapshot.serving and watch.age <= settings.heartbeat_timeout)
        if watch.age > settings.step_timeout:
            words = f"the step loop has taken no turn for {watch.age:.1f} s (--step-timeout)"
            end_hung(run_dir, "scheduler", words)
        await asyncio.sleep(_LOOK_SECONDS)
    raise StartupError(
        f"run directory {run_dir.path} was removed; control commands need an engine that is started"
        " anew"
    )
