"""The states of an engine's processes, as text."""

from collections.abc import Sequence

from triptych.v1 import control_pb2

_NAMES = {
    control_pb2.StageState.STATE_STARTING: "starting",
    control_pb2.StageState.STATE_READY: "ready",
    control_pb2.StageState.STATE_RESTARTING: "restarting",
    control_pb2.StageState.STATE_CRASH_LOOP: "in a crash loop",
    control_pb2.StageState.STATE_STOPPED: "stopped",
}


def state_name(stage: control_pb2.StageState) -> str:
    """The state in words."""
    return _NAMES.get(stage.state, "unknown")


def state_and_reason(stage: control_pb2.StageState) -> str:
    """The state, and why it is that where it is not ready."""
    return f"{state_name(stage)}: {stage.reason}" if stage.reason else state_name(stage)


def stage_lines(stages: Sequence[control_pb2.StageState]) -> list[str]:
    """A line for each process: name, state, pid, restarts and how the last life ended."""
    width = max((len(stage.name) for stage in stages), default=0)
    lines: list[str] = []
    for stage in stages:
        words = [f"{stage.name:<{width}}  {state_and_reason(stage)}"]
        if stage.pid:
            words.append(f"pid {stage.pid}")
        if stage.restarts_total:
            words.append(f"{stage.restarts_total} restarts, the last because it {stage.last_end}")
        lines.append(", ".join(words))
    return lines
