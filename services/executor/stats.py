"""What the executor counts. One thread writes; any may read (a value may be one step old)."""

import time
from collections import deque
from dataclasses import dataclass, field

from triptych.services.executor.backend import BackendFacts, DeviceFacts
from triptych.services.runtime.activity import Watch
from triptych.v1 import control_pb2, stage_pb2

RECENT_STEPS = 512
"""Durations that are kept: enough for a median over a window of a benchmark."""
_STUCK_SECONDS = 10.0  # where nobody says otherwise


@dataclass(slots=True)
class Counters:
    """Totals since the start, and what is being done now."""

    watch: Watch = field(default_factory=lambda: Watch(_STUCK_SECONDS))
    steps: int = 0
    step_seconds: float = 0.0
    tokens: int = 0
    load_seconds: float = 0.0
    load_bytes: tuple[int, int] = (0, 0)  # done and in all, while weights load
    draft_tokens: int = 0
    draft_seconds: float = 0.0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))

    def step_done(self, tokens: int, seconds: float) -> None:
        """Count a step that was computed."""
        self.steps += 1
        self.step_seconds += seconds
        self.tokens += tokens
        self.recent.append(seconds)

    def draft_done(self, tokens: int, seconds: float) -> None:
        """Count the draft model's part of a step: what it guessed, and how long it took."""
        self.draft_tokens += tokens
        self.draft_seconds += seconds

    def beat(self) -> stage_pb2.ExecutorBeat:
        """The numbers that a beat carries."""
        seen = self.watch.at(time.monotonic())
        return stage_pb2.ExecutorBeat(
            step_age_ms=seen.step_age_ms, steps_total=self.steps, activity=seen.activity
        )


def executor_stats(
    facts: BackendFacts | None,
    counters: Counters,
    draft: BackendFacts | None = None,
    device: DeviceFacts | None = None,
    ranks: tuple[int, int] = (0, 1),
) -> control_pb2.ExecutorStats:
    """The message; without facts (the weights still load) only totals and ranks (which of how many
    this is) are set."""
    stats = control_pb2.ExecutorStats(
        steps_total=counters.steps,
        step_seconds_total=counters.step_seconds,
        tokens_total=counters.tokens,
        load_seconds=counters.load_seconds,
        load_bytes_done=counters.load_bytes[0],
        load_bytes_total=counters.load_bytes[1],
        recent_step_seconds=counters.recent.copy(),
        draft_tokens_total=counters.draft_tokens,
        draft_seconds_total=counters.draft_seconds,
        rank=ranks[0],
        tensor_parallel_size=ranks[1],
    )
    if facts is not None:
        stats.device = facts.device
        stats.plan = facts.plan
        stats.dtype = facts.dtype
        stats.architecture = facts.architecture
        stats.model = facts.model
        stats.parameters = facts.parameters
        stats.weight_bytes = facts.weight_bytes
        stats.kv_cache_bytes = facts.kv_cache_bytes
        stats.num_blocks = facts.num_blocks
        stats.block_size = facts.block_size
        stats.max_model_len = facts.max_model_len
        stats.vocabulary_size = facts.vocabulary_size
        stats.num_host_blocks = facts.num_host_blocks
    if device is not None:
        stats.num_graphs = device.num_graphs
        stats.graph_bytes = device.graph_bytes
        stats.peak_memory_bytes = device.peak_memory_bytes
        stats.blocks_stored_total = device.blocks_stored
        stats.blocks_loaded_total = device.blocks_loaded
    if draft is not None:
        stats.draft_model = draft.model
        stats.draft_plan = draft.plan
        stats.draft_parameters = draft.parameters
        stats.draft_weight_bytes = draft.weight_bytes
        stats.draft_kv_cache_bytes = draft.kv_cache_bytes
    return stats
