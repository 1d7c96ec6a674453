"""Waiting between attempts, and what a channel is given."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.client.api import ClientOptions, RetryPolicy


def test_waits_double_up_to_the_longest_and_end_with_the_attempts() -> None:
    policy = RetryPolicy(attempts=6, first_wait=0.5, longest_wait=3.0)
    assert [policy.wait(failures, None, 1.0) for failures in range(1, 7)] == [
        0.5, 1.0, 2.0, 3.0, 3.0, None,
    ]  # fmt: skip


@given(st.integers(1, 10_000), st.floats(0, 30), st.floats(0, 1))
def test_a_wait_is_at_least_what_was_asked_for_and_bounded(
    failures: int, retry_after: float, jitter: float
) -> None:
    policy = RetryPolicy(attempts=1_000_000)
    wait = policy.wait(failures, retry_after, jitter)
    assert wait is not None
    assert retry_after <= wait <= retry_after + policy.longest_wait
    backoff = policy.wait(failures, None, jitter)
    assert backoff is not None
    assert wait == pytest.approx(retry_after + backoff)
    assert backoff >= min(policy.longest_wait, policy.first_wait) / 2


def test_who_asks_for_too_long_is_not_waited_for() -> None:
    assert RetryPolicy(longest_retry_after=2.0).wait(1, 2.5, 0.0) is None


@pytest.mark.parametrize(
    ("field", "value"), [("attempts", 0), ("first_wait", -1.0), ("longest_wait", float("nan"))]
)
def test_bad_policies_are_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        RetryPolicy(**{field: value})  # type: ignore[arg-type]  # one field at a time


def test_channel_arguments() -> None:
    options = ClientOptions(
        authority="engine.example",
        keepalive_seconds=7.5,
        channel_arguments=(("grpc.max_receive_message_length", -1), ("grpc.lb_policy_name", "x")),
    )
    arguments = dict(options.arguments())
    assert arguments["grpc.default_authority"] == "engine.example"
    assert arguments["grpc.keepalive_time_ms"] == 7500
    assert arguments["grpc.max_receive_message_length"] == -1
    assert arguments["grpc.lb_policy_name"] == "x"
