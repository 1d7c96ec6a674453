"""When the open loop's requests arrive, and how a period's calls become goodput."""

import random
from itertools import pairwise
from typing import Any

import pytest

from bench_modules import load_bench_module

periods = load_bench_module("overload_periods")


def call(due: float, over: float, *, tokens: int = 32, refused: bool = False) -> Any:
    return periods.Call(due, due, due, over, 0 if refused else tokens, refused)


def test_arrivals_are_a_poisson_process_of_the_rate() -> None:
    moments = periods.arrivals(50.0, 400.0, random.Random(3))
    assert moments == sorted(moments)
    assert 0 < moments[0] < moments[-1] < 400.0
    assert len(moments) == pytest.approx(20_000, rel=0.03)
    # Of an exponential distribution: the share of gaps above the mean is 1/e.
    gaps = [later - earlier for earlier, later in pairwise(moments)]
    assert sum(gap > 0.02 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.02)


def test_goodput_counts_whole_answers_while_requests_arrive() -> None:
    calls = [
        call(100.0, 101.0),  # while it filled up
        call(101.0, 103.0),
        call(104.0, 109.0),
        call(104.0, 104.1, refused=True),
        call(109.0, 111.0),  # after the last arrival
    ]
    period = periods.Period(calls, 100.0, 10.0)
    assert period.goodput == pytest.approx(64 / 8)
    assert (len(period.accepted), len(period.refused)) == (4, 1)


def test_an_answer_takes_from_when_it_was_due() -> None:
    late = periods.Call(10.0, 10.5, 11.0, 13.0, 32, False)
    assert late.seconds == 3.0
