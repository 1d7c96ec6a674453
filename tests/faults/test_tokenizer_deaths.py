"""A tokenizer dies: its clients are told so, its requests are freed, others notice nothing."""

from collections.abc import Sequence

import grpc
import httpx
import pytest

from fault_asks import Ask, Door, Said, Seen
from faults import Bench, compare, errors_among, killed, wait_for
from grpc_errors import as_error
from second_tokenizer import NAME, second_tokenizer

pytestmark = pytest.mark.faults


def check_cut_off(mix: Sequence[Ask], expected: Sequence[Said], got: Sequence[Said]) -> int:
    """Each was told everything, or that nobody is there any more; how many the latter."""
    errors = errors_among(mix, expected, got)
    for name, error in errors:
        if isinstance(error, grpc.RpcError):
            assert as_error(error).code() == grpc.StatusCode.UNAVAILABLE, (name, error)
        else:
            assert isinstance(error, httpx.TransportError), (name, error)
    return len(errors)


def test_its_clients_are_told_and_those_of_another_one_notice_nothing(
    bench: Bench, rounds: range
) -> None:
    with second_tokenizer(bench.engine, bench.model) as other:
        for _ in rounds:
            check_beside(bench, other)
    bench.settled()


def check_beside(bench: Bench, other: Door) -> None:
    mine, theirs = bench.mix(), bench.mix()
    expected, scene = bench.undisturbed(mine)
    expected_theirs, _ = bench.undisturbed(theirs)
    with bench.sent(theirs, Seen(), other) as whole, bench.sent(mine, scene.seen) as cut:
        scene.seen.wait(int(scene.expected_messages * bench.source.uniform(0.05, 0.4)))
        scene.kill("tokenizer-0")
        wait_for(lambda: all(each.done() for each in cut) or None, "not told")
        assert check_cut_off(mine, expected, [each() for each in cut]) > 0
        got = [each() for each in whole]
    assert compare(theirs, expected_theirs, got) == []
    bench.serving()  # back at the same port


def alone(bench: Bench) -> bool | None:
    stats = bench.engine.stats("scheduler").scheduler
    return stats.tokenizers_connected == 1 or None


def test_one_that_nobody_starts_again(bench: Bench, rounds: range) -> None:
    for _ in rounds:
        with killed(NAME), second_tokenizer(bench.engine, bench.model) as door:
            theirs = bench.mix()
            expected, _ = bench.undisturbed(theirs)

            with bench.sent(theirs, seen := Seen(), door) as cut:
                seen.wait(200)
                bench.kill(NAME)
                wait_for(lambda: all(each.done() for each in cut) or None, "not told")
                assert check_cut_off(theirs, expected, [each() for each in cut]) > 0
        bench.settled()
        wait_for(lambda: alone(bench), "the scheduler has not noticed")


def test_killed_while_it_is_being_started_again(bench: Bench) -> None:
    for _ in range(2):
        (pid,) = bench.kill("tokenizer-0")
        bench.successor("tokenizer-0", pid)
    bench.kill("tokenizer-0")
    bench.settled()
    bench.check(lambda scene: None, bench.mixer.streams(4))
