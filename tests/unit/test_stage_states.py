"""What is known of the stages when the file cannot be written: nothing, rather than what was."""

import os
from pathlib import Path

import pytest

from triptych.services.runtime.run_dir import RunDir
from triptych.services.runtime.stage_states import trouble, write_states
from triptych.v1 import control_pb2


def test_a_word_that_cannot_be_written_takes_the_one_before_along(tmp_path: Path) -> None:
    run_dir = RunDir.open(tmp_path / "run")
    lock = run_dir.lock("supervisor")
    stopped = control_pb2.StageState(
        name="executor-0", state=control_pb2.StageState.STATE_STOPPED, reason="unloaded"
    )
    write_states(run_dir, control_pb2.SupervisorStats(stages=[stopped]))
    assert trouble(run_dir) == "executor-0: unloaded"
    (run_dir.path / "stages.new").mkdir()  # in the place of a full disk
    with pytest.raises(OSError, match="Is a directory"):
        write_states(run_dir, control_pb2.SupervisorStats())
    assert trouble(run_dir) is None
    os.close(lock)
