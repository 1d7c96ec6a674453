"""What the step loop counts, and how other threads see it: as one consistent snapshot."""

from dataclasses import dataclass, field, fields

from triptych.v1 import control_pb2


@dataclass(slots=True)
class StepSeconds:
    """Seconds summed over all steps, by part. Written by the loop's thread only."""

    plan: float = 0.0
    write_inputs: float = 0.0
    hops: float = 0.0
    execute: float = 0.0
    sample: float = 0.0
    apply: float = 0.0
    emit: float = 0.0

    def message(self) -> control_pb2.StepTimes:
        """The same numbers as a message."""
        return control_pb2.StepTimes(
            **{each.name: getattr(self, each.name) for each in fields(self)}
        )


@dataclass(slots=True)
class Counters:
    """Totals since the start. Written by the loop's thread only.

    A finished request ended with a finish reason or, once accepted, with an error; a refused one
    was never accepted.
    """

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    requests_finished: int = 0
    requests_aborted: int = 0
    requests_refused: int = 0
    times: StepSeconds = field(default_factory=StepSeconds)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The loop's state at the end of a turn. `serving`: a step can be made, none is stuck."""

    stats: control_pb2.SchedulerStats
    serving: bool
    taken_at: float
