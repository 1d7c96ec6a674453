"""The simulation: figures reckoned by hand, both twins alike, starvation and unfairness seen."""

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulations import ONE_AT_A_TIME, ONE_SECOND, generated, of_class, simulate
from triptych.engine_core.policy import PolicyName
from triptych.services.simulator.arrivals import Arrival
from triptych.services.simulator.engine_shape import EngineShape
from triptych.services.simulator.fairness import FairnessWindows, max_min_shares
from triptych.services.simulator.figures import Figures
from triptych.services.simulator.generated_trace import TraceShape
from triptych.services.simulator.ledger import Ledger
from triptych.services.simulator.simulation import Progress, Simulation
from triptych.services.simulator.step_cost import StepCost
from triptych.services.simulator.trace_file import BadTrace

TWO = [Arrival(0.0, 3, 2), Arrival(0.5, 3, 1, priority=1, tenant="b")]
CROWDED = EngineShape(
    num_blocks=40,
    block_size=4,
    max_model_len=64,
    max_num_seqs=8,
    max_num_batched_tokens=24,
    max_num_waiting=6,
    long_prefill_token_threshold=10,
    watermark=0.05,
    queue_timeout=9.0,
    request_timeout=40.0,
)
BUSY = TraceShape(
    num_requests=300,
    request_rate=1.2,
    max_len=64,
    prompt_median=12,
    output_median=10,
    num_tenants=3,
    num_priorities=2,
    prefix_groups=4,
    prefix_tokens=9,
    prefix_share=0.6,
    seed=5,
)


def test_figures_reckoned_by_hand() -> None:
    """Steps of a second: A runs from 0 to 2, and B, which came at 0.5, from 2 to 3."""
    found = simulate(ONE_AT_A_TIME, TWO)
    assert (found.requests, found.done, found.refused, found.timed_out) == (2, 2, 0, 0)
    assert (found.steps, found.virtual_s, found.busy_share) == (3, 3.0, 1.0)
    assert (found.prompt_tokens, found.output_tokens) == (6, 3)
    assert found.output_tokens_per_s == pytest.approx(1.0)
    # Of a block of 4 slots: 3 tokens, then 4, then 3 of the other one.
    assert found.kv_waste == pytest.approx(2 / 12)
    assert found.kv_used == pytest.approx(1 / 4)
    assert found.mean_running == pytest.approx(1.0)
    assert found.mean_waiting == pytest.approx(1 / 3)
    assert (found.preemptions, found.prefix_hit_rate) == (0, 0.0)
    assert found.queue.mean == pytest.approx((0 + 1.5) / 2)
    assert (found.queue.p50, found.queue.max) == (0.0, 1.5)
    assert found.queue.p99 == pytest.approx(1.5, rel=0.005)
    assert found.ttft.mean == pytest.approx((1.0 + 2.5) / 2)
    assert found.total.mean == pytest.approx((2.0 + 2.5) / 2)
    waited = of_class(found, "b", 1)
    # The step that ran when it came is not one that went by without it; the next one is.
    assert (waited.done, waited.longest_wait_s, waited.longest_wait_steps) == (1, 1.5, 1)
    assert of_class(found, "", 0).longest_wait_steps == 0
    assert found.classes[0] is waited


def test_a_step_costs_by_tokens_and_by_context() -> None:
    cost = StepCost(1.0, 0.1, 0.01)
    found = simulate(ONE_AT_A_TIME, [Arrival(0.0, 3, 2)], cost)
    assert found.virtual_s == pytest.approx((1 + 0.3 + 0.03) + (1 + 0.1 + 0.04))


def test_nothing_happens_between_requests() -> None:
    found = simulate(ONE_AT_A_TIME, [Arrival(0.0, 1, 1), Arrival(99.0, 1, 1)])
    assert (found.steps, found.virtual_s, found.queue.max) == (2, 100.0, 0.0)
    assert found.busy_share == pytest.approx(0.02)


def test_an_empty_trace() -> None:
    found = simulate(ONE_AT_A_TIME, [])
    assert (found.requests, found.steps, found.kv_waste, found.ttft.p99) == (0, 0, 0.0, 0.0)


def test_the_queue_is_bounded_when_a_request_comes() -> None:
    """While the step runs, A still counts; when it is over, C finds room."""
    engine = replace(ONE_AT_A_TIME, max_num_waiting=0)
    arrivals = [Arrival(0.0, 3, 1), Arrival(1.0, 3, 1, tenant="b"), Arrival(1.1, 3, 1)]
    found = simulate(engine, arrivals)
    assert (found.done, found.refused, found.refused_too_long) == (2, 1, 0)
    assert of_class(found, "b", 0).refused == 1


def test_what_never_fits_is_refused_and_counted_apart() -> None:
    arrivals = [Arrival(0.0, 16, 1), Arrival(0.0, 10**6, 1), Arrival(0.0, 9, 8), Arrival(0.0, 9, 7)]
    found = simulate(ONE_AT_A_TIME, arrivals)
    assert (found.done, found.refused, found.refused_too_long) == (1, 3, 3)


def test_a_time_out_in_the_queue_passes_in_its_turn() -> None:
    """B's passes at 1.5, before D comes at 1.6 and finds its place; C has run by its own."""
    engine = replace(ONE_AT_A_TIME, max_num_waiting=1, queue_timeout=1.0)
    arrivals = [Arrival(0.0, 3, 2), Arrival(0.5, 3, 2, tenant="b"), Arrival(1.6, 3, 2)]
    found = simulate(engine, arrivals)
    assert (found.done, found.refused, found.timed_out) == (2, 0, 1)
    waited = of_class(found, "b", 0)
    assert (waited.timed_out, waited.longest_wait_s, waited.longest_wait_steps) == (1, 1.0, 1)


def test_a_time_out_in_all_ends_what_runs() -> None:
    found = simulate(replace(ONE_AT_A_TIME, request_timeout=2.5), [Arrival(0.0, 3, 9)])
    assert (found.done, found.timed_out, found.steps, found.output_tokens) == (0, 1, 3, 2)


def test_shared_prompts_are_found() -> None:
    alike = [Arrival(10.0 * at, 9, 1, prefix_group=7, num_prefix=8) for at in range(3)]
    found = simulate(ONE_AT_A_TIME, alike)
    assert found.prefix_hit_rate == pytest.approx(2 * 8 / 27)
    without = simulate(replace(ONE_AT_A_TIME, enable_prefix_caching=False), alike)
    assert without.prefix_hit_rate == 0.0


def test_recorded_tokens_are_found_too() -> None:
    text = tuple(range(9))
    alike = [Arrival(10.0 * at, 9, 1, prompt_token_ids=text) for at in range(2)]
    assert simulate(ONE_AT_A_TIME, alike).prefix_hit_rate == pytest.approx(8 / 18)


def test_both_implementations_find_the_same() -> None:
    arrivals = generated(BUSY)
    implementations: tuple[Literal["native", "python"], ...] = ("native", "python")
    native, python = (
        simulate(replace(CROWDED, engine_impl=each), arrivals, fairness_window=5.0)
        for each in implementations
    )
    assert native.simulated() == python.simulated()
    # All of it is in play.
    assert min(native.preemptions, native.timed_out, native.refused) > 0
    assert 0 < native.prefix_hit_rate < 1
    assert native.fairness is not None


def test_a_seed_is_a_result() -> None:
    again = [simulate(CROWDED, generated(BUSY), seed=seed).simulated() for seed in (0, 0)]
    assert again[0] == again[1]
    other = simulate(CROWDED, generated(replace(BUSY, seed=6))).simulated()
    assert other != again[0]


def _overloaded(policy: PolicyName, **shape: int | float) -> Figures:
    """Twice as much as it can do: a batch of 4, 10 tokens each, at 0.8 requests a second."""
    engine = EngineShape(
        num_blocks=64,
        block_size=4,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_num_waiting=2000,
        scheduling_policy=policy,
    )
    trace = TraceShape(
        num_requests=600,
        request_rate=0.8,
        max_len=64,
        prompt_median=8,
        prompt_sigma=0,
        output_median=10,
        output_sigma=0,
        num_tenants=int(shape.get("num_tenants", 1)),
        tenant_skew=shape.get("tenant_skew", 0.0),
        num_priorities=int(shape.get("num_priorities", 1)),
    )
    return simulate(engine, generated(trace))


def test_starvation_shows_under_priority() -> None:
    by_priority = _overloaded("priority", num_priorities=2)
    in_turn = _overloaded("fcfs", num_priorities=2)
    low, high = (of_class(by_priority, "", priority) for priority in (1, 0))
    assert low.longest_wait_steps > 4 * high.longest_wait_steps
    assert by_priority.classes[0] is low
    alike = [of_class(in_turn, "", priority).longest_wait_steps for priority in (1, 0)]
    assert max(alike) < 1.1 * min(alike)


def test_unfairness_shows_under_fcfs() -> None:
    in_turn = _overloaded("fcfs", num_tenants=3, tenant_skew=2.0)
    fair = _overloaded("fair", num_tenants=3, tenant_skew=2.0)
    assert in_turn.fairness is not None
    assert fair.fairness is not None
    assert fair.fairness > 0.95
    assert in_turn.fairness < 0.7


def test_fairness_is_what_was_got_over_what_was_due() -> None:
    fairness = FairnessWindows(10.0)
    for tenant in (0, 1):
        fairness.queued(tenant, 100)
    fairness.prompt(0, 30)
    fairness.prompt(1, 10)
    fairness.step_ends(9.0)
    assert fairness.index is None
    fairness.step_ends(10.0)
    first = 2.0**2 / (2 * (1.5**2 + 0.5**2))
    assert fairness.index == pytest.approx(first)
    # Of 40, the third asks for 5 and gets them: 17.5 are due to either of the others.
    for tenant, num_tokens in enumerate((30, 5, 5)):
        fairness.queued(tenant, 1)
        fairness.prompt(tenant, num_tokens)
    fairness.unqueued(2, 1)
    fairness.step_ends(20.0)
    second = 3.0**2 / (3 * ((30 / 17.5) ** 2 + (5 / 17.5) ** 2 + 1))
    assert fairness.index == pytest.approx((first + second) / 2)
    # Nobody waits at the end of the next: there was enough.
    for tenant in (0, 1):
        fairness.unqueued(tenant, 101)
    fairness.prompt(0, 5)
    fairness.step_ends(30.0)
    assert fairness.num_windows == 2
    fairness.check_idle()


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.floats(0.01, 1.0))
def test_max_min_shares_give_to_the_least_first(asked: list[int], share: float) -> None:
    total = max(1, int(sum(asked) * share))
    due = max_min_shares(np.array(asked), total)
    assert due.sum() == pytest.approx(total)
    assert (due <= asked).all()
    # Who gets less than somebody else gets all that it asks for.
    for got, wanted in zip(due, asked, strict=True):
        assert got == pytest.approx(due.max()) or got == wanted


def test_the_ledger_tells_when_somebody_is_left() -> None:
    ledger = Ledger(2, FairnessWindows(1.0))
    ledger.check_empty()
    ledger.accepted(Arrival(0.0, 1, 1), 0)
    with pytest.raises(AssertionError, match="1 requests came, 0 ended"):
        ledger.check_empty()


def test_no_more_tenants_than_there_is_memory_for() -> None:
    arrivals = (Arrival(0.0, 1, 1, tenant=str(number)) for number in range(5000))
    with pytest.raises(BadTrace, match="tenant, priority: more than 4096"):
        simulate(ONE_AT_A_TIME, arrivals)


def test_progress_is_told() -> None:
    told: list[Progress] = []
    simulation = Simulation(ONE_AT_A_TIME, ONE_SECOND, watch=told.append, watch_interval=0.0)
    simulation.run(TWO)
    assert [(each.requests, each.steps, each.virtual_s) for each in told] == [
        (2, 1, 1.0),
        (2, 2, 2.0),
        (2, 3, 3.0),
    ]


def test_a_shape_that_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens: 16 is below max_num_seqs 17"):
        replace(ONE_AT_A_TIME, max_num_seqs=17)
