"""A request that kills executors is failed alone, soon, and costs its neighbours time only."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import grpc
import pytest

from engine import generate_request
from fault_asks import Ask, Call, Http, Said, Seen
from faults import Bench, compare
from grpc_errors import as_error
from scripted_models import T1_VOCABULARY
from step_watch import at_each_step_with
from triptych.v1 import inference_pb2

pytestmark = pytest.mark.faults

POISON = T1_VOCABULARY - 1
"""A token that is in one request only; whatever executor computes it is killed."""
FATAL = "executors died"
TOKENS = 150
ARRIVES = 0.05
"""Seconds in which a frozen executor's last word reaches the scheduler."""


def poisoned(name: str = "poison") -> Call:
    """Its prompt takes several steps, so that nobody can miss it."""
    return Call(name, generate_request([POISON] * 400, max_tokens=TOKENS, ignore_eos=True))


def neighbours(bench: Bench) -> list[Ask]:
    """Streams that never draw the token."""
    mix = [ask for ask in bench.mixer.streams(6) if isinstance(ask, Call)]
    for ask in mix:
        assert isinstance(ask.request, inference_pb2.GenerateRequest)
        ask.request.sampling_params.logit_bias[POISON] = -100.0
    return [*mix]


def run(bench: Bench, mix: list[Ask], poison: list[Ask]) -> tuple[list[Said], list[Said], int]:
    """What the neighbours and the poisoned ones were told, and how many executors died."""
    deaths: list[int] = []

    def kill(still: Callable[[], bool]) -> bool:
        """In a step that computes the token, else not: a witness may be late."""
        pid = bench.holder("executor-0")  # without asking it, which takes longer
        timely = False
        if pid is not None:
            with suppress(ProcessLookupError):  # somebody has ended it
                os.kill(pid, signal.SIGSTOP)
                time.sleep(ARRIVES)
                timely = still()
                os.kill(pid, signal.SIGKILL if timely else signal.SIGCONT)
        if timely and pid is not None:
            deaths.append(pid)
        return timely

    with at_each_step_with(POISON, bench.pid("scheduler"), kill):
        with bench.sent([*poison, *mix], Seen()) as sent:
            got = [each() for each in sent]
        told = got[: len(poison)]
        # The witness looks at a ring that is written anew every few milliseconds. One that came
        # whole was missed: it is asked again, and the deaths before do not count.
        for _ in range(10):
            missed = [at for at, said in enumerate(told) if "error" not in said]
            if not missed:
                break
            deaths.clear()
            bench.engine.flush_cache()
            with bench.sent([poison[at] for at in missed], Seen()) as sent:
                for at, each in zip(missed, sent, strict=True):
                    told[at] = each()
    return got[len(poison) :], told, len(deaths)


def check_fatal(said: Said) -> None:
    error = said.get("error")
    assert isinstance(error, grpc.RpcError), said
    assert as_error(error).code() == grpc.StatusCode.INTERNAL
    assert FATAL in as_error(error).details()


def test_alone_it_fails_at_its_second_death(bench: Bench) -> None:
    before = bench.engine.stats("scheduler").scheduler.choices_fatal_total
    _, (told,), deaths = run(bench, [], [poisoned()])
    check_fatal(told)
    assert deaths == 2
    bench.settled()
    assert bench.engine.stats("scheduler").scheduler.choices_fatal_total == before + 1
    bench.check(lambda scene: None, bench.mixer.streams(2))


def test_in_company_it_fails_at_its_third_and_alone(bench: Bench, rounds: range) -> None:
    for _ in rounds:
        mix = neighbours(bench)
        expected, _ = bench.undisturbed(mix)
        got, (told,), deaths = run(bench, mix, [poisoned()])
        check_fatal(told)
        assert compare(mix, expected, got) == []
        assert deaths <= 3
        bench.settled()


def test_two_of_them(bench: Bench) -> None:
    mix = neighbours(bench)
    expected, _ = bench.undisturbed(mix)
    got, told, deaths = run(bench, mix, [poisoned("one"), poisoned("two")])
    for each in told:
        check_fatal(each)
    assert compare(mix, expected, got) == []
    assert deaths <= 6
    bench.settled()


def test_over_http(bench: Bench) -> None:
    body = {"prompt": [POISON] * 400, "max_tokens": TOKENS, "ignore_eos": True}
    _, (told,), _ = run(bench, [], [Http("poison", "/v1/completions", body)])
    assert "fatal_request" in str(told["error"])
    streamed = replace(Http("poison", "/v1/completions", body), body={**body, "stream": True})
    _, (told,), _ = run(bench, [], [streamed])
    assert "fatal_request" in str(told["error"])
    bench.settled()
