"""How many blocks a device has room for: weights are in place, a step is tried, the rest is cache.

The largest step that a scheduler may make is not known before it says hello, and the cache must be
there by then: it is taken to be max_num_batched_tokens tokens, max_num_seqs rows, which are
settings of the whole engine.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from triptych.services.executor.device.device import Device, MemoryFacts
from triptych.services.executor.kv_budget import DEFAULT_CAP_SEQUENCES
from triptych.services.runtime.lifecycle import StartupError

KNOBS = (
    "a larger --gpu-memory-utilization, a smaller --max-num-seqs or --max-num-batched-tokens, or a "
    "smaller --max-model-len (or --kv-cache-memory) leaves more room"
)
"""What to turn when a device's memory does not suffice."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes, as measured: taken of the device before the cache; more at the peak of a step; by all
    graphs."""

    taken: int
    step_peak: int
    graphs: int


def measure(
    device: Device, largest_step: Callable[[], None], graphs: Callable[[], int]
) -> MemoryNeed:
    """Run a step (which queues work) and see what it takes; `graphs` says what those will."""
    device.synchronize()
    device.trim()
    device.reset_peak()
    largest_step()
    device.synchronize()
    peak = device.memory().peak
    device.trim()
    facts = device.memory()  # with what the first step took for good
    return MemoryNeed(facts.total - facts.free, max(0, peak - facts.reserved), graphs())


def blocks_within(
    facts: MemoryFacts, need: MemoryNeed, utilization: float, block_bytes: int
) -> int:
    """Blocks that fit into the share of the device's memory that may be used. Raises StartupError
    when none does."""
    share = int(facts.total * utilization)
    room = share - need.taken - need.step_peak - need.graphs
    _log.info(
        "memory of the device",
        extra={
            "total_bytes": facts.total,
            "share_bytes": share,
            "taken_bytes": need.taken,
            "step_peak_bytes": need.step_peak,
            "graph_bytes": need.graphs,
            "kv_cache_bytes": max(room, 0),
        },
    )
    if room < block_bytes:
        raise StartupError(
            f"no room for the KV cache: of {facts.total} bytes of the device {share} may be used, "
            f"{need.taken} are taken, a step takes {need.step_peak}, graphs {need.graphs}, and one "
            f"block needs {block_bytes}; {KNOBS}"
        )
    return room // block_bytes


def most_useful(max_model_len: int, block_size: int) -> int:
    """Blocks beyond which an emulated device, whose memory is the machine's, takes no more."""
    return DEFAULT_CAP_SEQUENCES * -(-max_model_len // block_size)
