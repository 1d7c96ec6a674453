"""Somebody empties /tmp while an engine runs there: it goes on, and outlives deaths as before."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from faults import KILLED_OFTEN, Scene, compare, in_decode, running_bench, wait_for

pytestmark = pytest.mark.faults


def test_the_scheduler_makes_another_one(tmp_path: Path) -> None:
    with running_bench(tmp_path, *KILLED_OFTEN, seed=31) as bench:
        executor = bench.pid("executor-0")

        def remove(scene: Scene) -> None:
            in_decode(scene)
            shutil.rmtree(bench.engine.run_dir)
            wait_for(lambda: bench.holder("scheduler"), "no scheduler has made another one")
            os.kill(executor, signal.SIGKILL)

        def kill(scene: Scene) -> None:
            in_decode(scene)
            scene.kill("scheduler", "executor-0")

        for disturb in (remove, kill):
            mix = bench.mixer.mix()
            expected, scene = bench.undisturbed(mix)
            assert compare(mix, expected, bench.disturbed(scene, disturb)) == []
            bench.serving()
