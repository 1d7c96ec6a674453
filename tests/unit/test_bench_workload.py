"""The benchmarks' workload and what becomes of the times."""

import random

import pytest

from bench_modules import load_bench_module

workload = load_bench_module("workload")


def test_percentile_is_the_nearest_rank() -> None:
    values = [float(value) for value in range(1, 101)]
    random.Random(3).shuffle(values)
    assert workload.percentile(values, 0.5) == 50
    assert workload.percentile(values, 0.99) == 99
    assert workload.percentile(values, 1.0) == 100
    assert workload.percentile([7.0], 0.01) == 7.0
    assert workload.percentile([1.0, 2.0, 3.0], 0.99) == 3.0


@pytest.mark.parametrize("share", [0.0, 1.1])
def test_percentile_refuses_a_share_that_means_nothing(share: float) -> None:
    with pytest.raises(AssertionError):
        workload.percentile([1.0], share)


def test_percentile_refuses_no_values() -> None:
    with pytest.raises(AssertionError):
        workload.percentile([], 0.5)


def test_the_mixed_workload_is_the_one_of_the_issue() -> None:
    requests = workload.mixed_workload()
    assert len(requests) == 64
    assert sum(len(request.prompt) for request in requests) == 18336
    assert sum(request.new_tokens for request in requests) == 9588
    assert all(16 <= len(request.prompt) <= 512 for request in requests)
    assert all(16 <= request.new_tokens <= 256 for request in requests)
    assert requests == workload.mixed_workload(0)


def test_repeats_have_the_same_lengths_and_other_tokens() -> None:
    first, second, third = (workload.mixed_workload(repeat) for repeat in range(3))
    for a, b, c in zip(first, second, third, strict=True):
        assert len(a.prompt) == len(b.prompt) == len(c.prompt)
        assert a.new_tokens == b.new_tokens == c.new_tokens
        assert a.prompt[:16] != b.prompt[:16] != c.prompt[:16]


def test_a_short_workload_is_the_beginning_of_the_whole() -> None:
    assert workload.mixed_workload(2, 5) == workload.mixed_workload(2)[:5]


def test_token_ids_are_ordinary() -> None:
    ids = workload.random_ids(random.Random(0), 2000)
    assert min(ids) >= 300
    assert max(ids) < 40000


def test_served_figures() -> None:
    timelines = [
        workload.Timeline(10.0, [11.0, 11.5, 12.0]),
        workload.Timeline(10.5, [13.5, 14.0]),
        workload.Timeline(11.0, [12.0]),  # a single message has no gap
    ]
    served = workload.served_figures(timelines, 8)
    assert served.tokens_per_second == 8 / 4.0
    assert served.ttft_p99 == 3.0
    assert served.itl_p99 == 0.5
