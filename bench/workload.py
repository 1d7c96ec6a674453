"""What the engines are asked, and how the answers' times become figures. No engine, no clock.

All token ids are ordinary ones of the SmolLM2 vocabulary, drawn from a seeded generator: the same
prompts on every machine and for every engine.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

FIRST_ID, LAST_ID = 300, 40000  # half-open
MIXED_REQUESTS = 64
MIXED_PROMPT = (16, 512)
MIXED_OUTPUT = (16, 256)


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and exactly how many tokens follow it."""

    prompt: list[int]
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """When one request was sent and when each of its messages came, in seconds of one clock."""

    sent: float
    arrivals: list[float]


@dataclass(frozen=True, slots=True)
class Served:
    """Figures of one served workload; seconds and output tokens per second."""

    tokens_per_second: float
    ttft_p99: float
    itl_p99: float


def random_ids(generator: random.Random, count: int) -> list[int]:
    """Token ids, independent and uniform."""
    return [generator.randrange(FIRST_ID, LAST_ID) for _ in range(count)]


def mixed_workload(repeat: int = 0, requests: int = MIXED_REQUESTS) -> list[Request]:
    """The `served_mixed` requests: prompts of 16 to 512 tokens, outputs of 16 to 256, seed 0.

    Every repeat has the same lengths; from the second on other tokens, so that no cache of
    prefixes answers. `requests` cuts the list short.
    """
    generator = random.Random(0)
    lengths = [
        (generator.randint(*MIXED_PROMPT), generator.randint(*MIXED_OUTPUT))
        for _ in range(MIXED_REQUESTS)
    ]
    if repeat:
        generator = random.Random(7777 * repeat)
    whole = [Request(random_ids(generator, prompt), output) for prompt, output in lengths]
    return whole[:requests]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (above 0, at most 1) of the values do not exceed."""
    assert values, "no values"
    assert 0 < share <= 1, share
    return sorted(values)[math.ceil(share * len(values)) - 1]


def served_figures(timelines: Sequence[Timeline], new_tokens: int) -> Served:
    """Throughput from the first request sent to the last message; p99 over requests and gaps.

    Time to first token counts from when the request was sent. A gap lies between two messages of
    one request, however many tokens they carry.
    """
    start = min(timeline.sent for timeline in timelines)
    end = max(timeline.arrivals[-1] for timeline in timelines)
    first = [timeline.arrivals[0] - timeline.sent for timeline in timelines]
    gaps = [
        later - earlier
        for timeline in timelines
        for earlier, later in zip(timeline.arrivals, timeline.arrivals[1:], strict=False)
    ]
    return Served(new_tokens / (end - start), percentile(first, 0.99), percentile(gaps, 0.99))
