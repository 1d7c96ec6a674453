"""What the services of others tell of the engine, whatever their names for it are."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from triptych.v1 import control_pb2

SchedulerStats = Callable[[], Awaitable[control_pb2.StatsResponse | None]]


@dataclass(frozen=True, slots=True)
class Engine:
    """`folder`: of the tokenizer's files, if they are in one.

    `scheduler_stats` None: the scheduler does not answer. `flush_cache`: how many of the
    scheduler's blocks were forgotten; raises Unavailable. `reason`: why nothing is served now;
    empty when it is. `max_message_bytes`: of a message to a client; gRPC sends no larger one.
    """

    model_path: str
    max_message_bytes: int
    folder: Path | None
    scheduler_stats: SchedulerStats
    flush_cache: Callable[[], Awaitable[int]]
    reason: Callable[[], str]
