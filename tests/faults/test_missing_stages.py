"""Requests that come while a stage is missing: they wait for it, but not for ever."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import grpc
import pytest

from engine import is_serving
from fault_asks import Seen
from faults import Bench, compare, running_bench, wait_for
from grpc_errors import as_error

pytestmark = pytest.mark.faults

VICTIMS = [("executor-0",), ("scheduler",), ("scheduler", "executor-0")]


def not_serving(bench: Bench) -> bool | None:
    return None if is_serving(bench.door.address) else True


def all_open(bench: Bench, count: int) -> bool | None:
    return bench.engine.stats("tokenizer-0").tokenizer.requests_running >= count or None


def test_they_are_answered_when_it_is_back(bench: Bench, rounds: range) -> None:
    for victims in VICTIMS * len(rounds):
        mix = bench.mix()
        expected, _ = bench.undisturbed(mix)
        with ExitStack() as stack:
            with bench.nobody_starts_anything():
                bench.kill(*victims)
                wait_for(lambda: not_serving(bench), "it says that it serves")
                sent = stack.enter_context(bench.sent(mix, Seen()))
                wait_for(partial(all_open, bench, len(mix)), "not all are taken")
            got = [each() for each in sent]
        assert compare(mix, expected, got) == []
        bench.settled()


@pytest.mark.parametrize("victims", VICTIMS, ids="+".join)
def test_they_do_not_wait_for_what_does_not_come(tmp_path: Path, victims: tuple[str, ...]) -> None:
    with running_bench(tmp_path, "--recovery-timeout", "1", seed=32) as bench:
        before, after = bench.mixer.streams(3, tokens=900), bench.mixer.streams(3)
        bench.undisturbed(before)
        with bench.sent(before, seen := Seen()) as sent:
            seen.wait(30)
            with bench.nobody_starts_anything():
                with bench.midway(3):
                    bench.kill(*victims)
                wait_for(lambda: not_serving(bench), "it says that it serves")
                with bench.sent(after, Seen()) as sent_after:
                    told = [each() for each in [*sent, *sent_after]]
        for said in told:
            error = said["error"]
            assert isinstance(error, grpc.RpcError)
            assert as_error(error).code() == grpc.StatusCode.UNAVAILABLE
            assert "recovery_timeout" in as_error(error).details()
        bench.settled()
        bench.check(lambda scene: None, before)
