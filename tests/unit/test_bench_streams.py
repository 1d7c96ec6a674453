"""How the benchmarks count the time of a token over several streams."""

import pytest

from bench_modules import load_bench_module

streams = load_bench_module("streams")


def streamed(*arrivals: tuple[float, int]) -> object:
    return streams.Streamed(0.0, list(arrivals), [], "")


def test_one_stream_counts_from_its_first_message() -> None:
    stream = streamed((1.0, 2), (2.0, 3), (3.0, 6))
    assert streams.seconds_per_token([stream]) == pytest.approx(2.0 / 4)


def test_many_count_while_all_of_them_run() -> None:
    early = streamed((1.0, 1), (2.0, 2), (3.0, 3), (4.0, 4))
    late = streamed((2.0, 1), (3.0, 2), (4.0, 3), (9.0, 4))
    # From 2.0 to 4.0 each has had two more tokens.
    assert streams.seconds_per_token([early, late]) == pytest.approx(1.0)


def test_streams_that_hardly_ran_together_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="ask for more"):
        streams.seconds_per_token([streamed((1.0, 5)), streamed((1.0, 5))])


def test_the_first_token_counts_from_the_request() -> None:
    assert streams.Streamed(3.0, [(4.5, 1)], [7], "a").seconds_to_first == 1.5
