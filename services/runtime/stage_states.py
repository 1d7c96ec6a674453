"""What the supervisor knows of its processes: a file in the run directory that every process reads.

A file, because who reads it needs it exactly when other processes are gone. The supervisor alone
writes it; without one (processes that were started one by one) there is none, and nothing is known.
"""

from google.protobuf.message import DecodeError

from triptych.services.runtime.run_dir import RunDir
from triptych.v1 import control_pb2

_NAME = "stages.pb"
_MOST_BYTES = 1 << 20
_HOPELESS = frozenset(
    {control_pb2.StageState.STATE_CRASH_LOOP, control_pb2.StageState.STATE_STOPPED}
)


def write_states(run_dir: RunDir, stats: control_pb2.SupervisorStats) -> None:
    """Replace what is known, at once for all readers. The caller holds the supervisor's lock.

    Raises OSError where it cannot be written; then nothing is known, rather than what was before.
    """
    path = run_dir.path / _NAME
    fresh = path.with_suffix(".new")
    try:
        fresh.write_bytes(stats.SerializeToString())
        fresh.replace(path)
    except OSError:
        remove_states(run_dir)
        raise


def remove_states(run_dir: RunDir) -> None:
    """Nothing is known any more."""
    (run_dir.path / _NAME).unlink(missing_ok=True)


def read_states(run_dir: RunDir) -> control_pb2.SupervisorStats:
    """What a living supervisor knows; empty without one."""
    if not run_dir.held("supervisor"):
        return control_pb2.SupervisorStats()
    try:
        with (run_dir.path / _NAME).open("rb") as file:
            return control_pb2.SupervisorStats.FromString(file.read(_MOST_BYTES))
    except (OSError, DecodeError):
        return control_pb2.SupervisorStats()


def trouble(run_dir: RunDir) -> str | None:
    """Why no request can run and waiting will not help: a stage that crashes again and again, or
    was stopped. None where that is not known of any stage."""
    for stage in read_states(run_dir).stages:
        if stage.state in _HOPELESS:
            return f"{stage.name}: {stage.reason}"
    return None
