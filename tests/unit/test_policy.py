"""Policies are sort keys; what they promise about order and starvation."""

from heapq import heappop, heappush

from triptych.engine_core.ids import RequestId
from triptych.engine_core.policy import FairShare, Fcfs, Priority, ShortestPrefill, policy_of
from triptych.engine_core.request import Request
from triptych.engine_core.sampling_params import SamplingParams


def wish(
    number: int, prompt: int = 1, *, priority: int = 0, tenant: str = "", n: int = 1
) -> Request:
    params = SamplingParams(max_tokens=100, n=n)
    return Request(RequestId(number), (1,) * prompt, params, priority, tenant=tenant)


def test_each_name_has_its_strategy() -> None:
    assert type(policy_of("fcfs")) is Fcfs
    assert type(policy_of("priority")) is Priority
    assert type(policy_of("shortest-prefill")) is ShortestPrefill
    assert type(policy_of("fair")) is FairShare


def test_fcfs_looks_at_nothing() -> None:
    policy = Fcfs()
    assert policy.rank(wish(1, 500, priority=9)) == policy.rank(wish(2, 1, priority=-9))


def test_priority_is_the_number() -> None:
    policy = Priority()
    assert (
        policy.rank(wish(1, priority=-1)) < policy.rank(wish(2)) < policy.rank(wish(3, priority=1))
    )


def test_short_prompts_overtake_so_far_and_no_further() -> None:
    policy = ShortestPrefill()
    long = policy.rank(wish(1, prompt=100))
    overtaken = 0
    while policy.rank(wish(2, prompt=10)) < long:
        overtaken += 10
    assert 0 < overtaken <= ShortestPrefill.PATIENCE * 100


def test_tenants_take_turns_whatever_one_of_them_sends() -> None:
    policy = FairShare()
    greedy = [policy.rank(wish(number, prompt=50, tenant="a")) for number in range(10)]
    modest = [policy.rank(wish(100 + number, prompt=50, tenant="b")) for number in range(2)]
    assert greedy == sorted(greedy)
    assert modest[0] == greedy[0], "its first stands beside the other's first"
    assert modest[1] == greedy[1]


def test_output_counts_against_its_tenant() -> None:
    policy = FairShare()
    keeps_busy = wish(0, tenant="c")
    policy.rank(keeps_busy)
    first = wish(1, prompt=10, tenant="a")
    policy.rank(first)
    policy.ended(first, num_output=500)
    assert policy.rank(wish(2, prompt=10, tenant="a")) >= 500
    assert policy.rank(wish(3, prompt=10, tenant="b")) < 500


def test_who_always_comes_as_somebody_new_starves_nobody() -> None:
    policy = FairShare()
    waiting: list[tuple[float, int, Request]] = []

    def submit(number: int, prompt: int, tenant: str) -> None:
        request = wish(number, prompt, tenant=tenant)
        heappush(waiting, (policy.rank(request), number, request))

    for number in range(3):
        submit(number, 100, "patient")
    served: list[int] = []
    while not {0, 1, 2} <= set(served):
        while len(waiting) < 8:
            number = 100 + len(served) + len(waiting)
            submit(number, 10, f"new-{number}")
        _, number, request = heappop(waiting)
        policy.ended(request, 10)
        served.append(number)
        assert len(served) < 200, "it is overtaken without end"


def test_nothing_is_kept_when_idle_nor_of_too_many_tenants() -> None:
    policy = FairShare()
    stays = wish(0, tenant="stays")
    policy.rank(stays)
    for number in range(1, FairShare.MAX_TENANTS + 500):
        request = wish(number, tenant=f"t{number}", n=2)
        policy.rank(request)
        policy.ended(request, 5)
        policy.ended(request, 5)
    assert len(policy._free_at) <= FairShare.MAX_TENANTS + 1
    policy.ended(stays, 1)
    assert not policy._free_at
    assert not policy._open
    assert not policy._starts
