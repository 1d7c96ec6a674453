"""What a simulation found, as values."""

from dataclasses import asdict, dataclass
from typing import NamedTuple

from triptych.services.simulator.quantiles import Quantiles


class Times(NamedTuple):
    """Seconds; the percentiles are right to 0.5%."""

    mean: float
    p50: float
    p99: float
    max: float

    @classmethod
    def of(cls, quantiles: Quantiles) -> "Times":
        """What was counted."""
        return cls(quantiles.mean, quantiles.at(0.5), quantiles.at(0.99), quantiles.max)

    def rounded(self) -> dict[str, float]:
        """For JSON: a microsecond is enough."""
        return {name: round(value, 6) for name, value in self._asdict().items()}


@dataclass(slots=True)
class ClassFigures:
    """Requests of one tenant and priority. The longest wait is that before a request first ran (or
    timed out), in seconds and in steps that went by without it."""

    tenant: str
    priority: int
    done: int = 0
    refused: int = 0
    timed_out: int = 0
    longest_wait_s: float = 0.0
    longest_wait_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerCost:
    """Wall-clock microseconds of the scheduler itself, on this machine: means over steps, and over
    requests for `submit_us`. `step_us` is the sum of the four parts of a step."""

    step_us: float
    plan_us: float
    write_us: float
    samples_us: float
    apply_us: float
    submit_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of a whole run. Shares are 0 to 1, times are virtual seconds but for `scheduler` and
    `wall_s`. Means over time are weighted by the length of the steps."""

    requests: int
    done: int
    refused: int
    refused_too_long: int  # of `refused`: what could never fit
    timed_out: int
    steps: int
    prompt_tokens: int  # of requests that started, those found in the cache included
    output_tokens: int
    virtual_s: float
    busy_share: float
    output_tokens_per_s: float
    kv_waste: float  # unused slots of held blocks over slots of held blocks
    kv_used: float  # held blocks over all
    mean_running: float
    mean_waiting: float
    preemptions: int
    prefix_hit_rate: float  # tokens found computed over tokens looked up
    queue: Times
    ttft: Times
    total: Times
    fairness: float | None  # Jain's index (fairness.py)
    fairness_windows: int
    scheduler: SchedulerCost
    wall_s: float
    classes: tuple[ClassFigures, ...]  # longest wait first

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        values = asdict(self)
        for name in ("queue", "ttft", "total"):
            times: Times = getattr(self, name)
            values[name] = times.rounded()
        return values

    def simulated(self) -> dict[str, object]:
        """All but what this machine's speed decides: two runs of one trace agree in it."""
        values = self.as_json()
        del values["scheduler"], values["wall_s"]
        return values
