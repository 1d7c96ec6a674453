"""What the step loop counts, and how other threads see it: as one consistent snapshot."""

from dataclasses import dataclass, field, fields
from typing import NamedTuple

from triptych.engine_core.scheduler import Scheduler
from triptych.services.runtime.activity import Seen
from triptych.services.scheduler.grammars import Grammars
from triptych.services.scheduler.leases import Leases
from triptych.v1 import control_pb2, stage_pb2


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
    masks: float = 0.0

    def message(self) -> control_pb2.StepTimes:
        """The same numbers as a message."""
        return control_pb2.StepTimes(
            **{each.name: getattr(self, each.name) for each in fields(self)}
        )


@dataclass(slots=True)
class Counters:
    """Totals since the start. Written by the loop's thread only.

    A finished request ended with a finish reason or, once accepted, with an error; a refused one
    was never accepted. What a scheduler before this one had accepted counts there: its prompts and
    refusals are not new. A draft is accepted where its very token is drawn.
    """

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    requests_finished: int = 0
    requests_aborted: int = 0
    requests_refused: int = 0
    requests_timed_out: int = 0
    executors_lost: int = 0
    choices_accepted_before: int = 0
    choices_fatal: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    steps_ahead: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    wasted_tokens: int = 0
    external_tokens: int = 0
    sampler_timeouts: int = 0
    times: StepSeconds = field(default_factory=StepSeconds)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The loop's state at the end of a turn. `seen`: by its ListeningClock. `serving`: steps can be
    made, and are if there is work."""

    stats: control_pb2.SchedulerStats
    seen: Seen
    serving: bool


class Totals(NamedTuple):
    """What a core counts, and the next one goes on from."""

    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


def totals_of(core: Scheduler | None, before: Totals) -> Totals:
    """The core's totals on top of those of the cores before it."""
    if core is None:
        return before
    return Totals(
        before.preemptions + core.preemptions_total,
        before.prefix_queries + core.batch.prefix_queries_total,
        before.prefix_hits + core.batch.prefix_hits_total,
    )


def scheduler_stats(
    core: Scheduler | None,
    facts: stage_pb2.ModelFacts | None,
    counters: Counters,
    before: Totals,
) -> control_pb2.SchedulerStats:
    """What the core and the counters know; the loop adds the rest."""
    num_blocks = facts.num_blocks if facts is not None else 0
    totals = totals_of(core, before)
    return control_pb2.SchedulerStats(
        requests_waiting=core.num_waiting if core else 0,
        requests_running=core.num_running if core else 0,
        blocks_total=num_blocks,
        blocks_free=core.batch.num_free_blocks if core else num_blocks,
        blocks_cached=core.batch.num_cached_blocks if core else 0,
        kv_unused_slots=core.batch.num_unused_slots if core else 0,
        block_size=facts.block_size if facts else 0,
        steps_total=counters.steps,
        preemptions_total=totals.preemptions,
        prefix_queries_total=totals.prefix_queries,
        prefix_hits_total=totals.prefix_hits,
        prompt_tokens_total=counters.prompt_tokens,
        generated_tokens_total=counters.generated_tokens,
        requests_finished_total=counters.requests_finished,
        requests_aborted_total=counters.requests_aborted,
        requests_refused_total=counters.requests_refused,
        requests_timed_out_total=counters.requests_timed_out,
        executors_lost_total=counters.executors_lost,
        choices_accepted_before_total=counters.choices_accepted_before,
        choices_fatal_total=counters.choices_fatal,
        choices_suspected=len(core.suspects) if core else 0,
        draft_tokens_total=counters.draft_tokens,
        accepted_draft_tokens_total=counters.accepted_draft_tokens,
        steps_ahead_total=counters.steps_ahead,
        device_tokens_total=counters.device_tokens,
        host_tokens_total=counters.host_tokens,
        wasted_tokens_total=counters.wasted_tokens,
        external_tokens_total=counters.external_tokens,
        sampler_timeouts_total=counters.sampler_timeouts,
        step_times=counters.times.message(),
    )


def add_grammars(stats: control_pb2.SchedulerStats, grammars: Grammars) -> None:
    """What the cache of compiled grammars counts."""
    stats.grammars_compiled_total = grammars.compiled_total
    stats.grammar_cache_hits_total = grammars.hits_total
    stats.grammar_compile_seconds_total = grammars.compile_seconds_total
    stats.grammars_cached = len(grammars)


def add_leases(stats: control_pb2.SchedulerStats, leases: Leases) -> None:
    """What programs hold that draw tokens themselves."""
    if not leases.num_leases:
        return  # all are 0
    stats.sampler_leases = leases.num_leases
    stats.sampler_rows = leases.num_rows
    stats.sampler_rows_used = leases.num_used
