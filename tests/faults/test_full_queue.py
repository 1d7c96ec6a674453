"""More requests than may wait are refused at once, whatever stage is there; others are exact."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import grpc
import httpx
import pytest

from engine import generate_request
from fault_asks import Ask, Said, Seen
from faults import KILLED_OFTEN, Bench, errors_among, running_bench, wait_for
from grpc_errors import as_error, refused, retry_delay, violations

pytestmark = pytest.mark.faults

RUN, WAIT, OPEN = 2, 6, 24
FULL = grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    flags = (*KILLED_OFTEN, "--max-num-seqs", str(RUN), "--max-num-waiting", str(WAIT),
             "--max-streams", str(OPEN))  # fmt: skip
    with running_bench(tmp_path_factory.mktemp("queue"), *flags, seed=24) as bench:
        yield bench


def reference(bench: Bench, mix: Sequence[Ask]) -> list[Said]:
    """One after the other: all at once they would not be taken."""
    return [ask.run(bench.door, Seen()) for ask in mix]


def check_flood(mix: Sequence[Ask], expected: Sequence[Said], got: Sequence[Said]) -> int:
    """Each was told what it should be, or refused with a hint when to come again; how many."""
    errors = errors_among(mix, expected, got)
    for _, error in errors:
        assert isinstance(error, grpc.RpcError), error
        assert as_error(error).code() == FULL, error
        assert (retry_delay(as_error(error)) or 0) > 0
    return len(errors)


def test_while_all_is_well(bench: Bench) -> None:
    mix = bench.mixer.streams(3 * (RUN + WAIT), tokens=60)
    expected = reference(bench, mix)
    with bench.sent(mix, Seen()) as sent:
        with bench.engine.frozen():  # until one is refused: a fast engine would be done before
            wait_for(lambda: any(each.done() for each in sent) or None, "nobody is refused")
        got = [each() for each in sent]
    assert 0 < check_flood(mix, expected, got) <= len(mix) - RUN - WAIT
    bench.settled()


@pytest.mark.parametrize("names", [("executor-0",), ("scheduler",), ("scheduler", "executor-0")])
def test_while_a_stage_is_started_again(bench: Bench, names: tuple[str, ...]) -> None:
    """Those that were taken before are never refused afterwards, however full it is then."""
    first, late = (
        bench.mixer.streams(RUN + WAIT, tokens=100),
        bench.mixer.streams(2 * OPEN, tokens=5),
    )
    expected_first, expected_late = reference(bench, first), reference(bench, late)
    with bench.sent(first, seen := Seen()) as sent:
        seen.wait(RUN + 20)
        bench.kill(*names)
        with bench.sent(late, Seen()) as sent_late:
            got_late = [each() for each in sent_late]
        got = [each() for each in sent]
    assert check_flood(first, expected_first, got) == 0
    assert check_flood(late, expected_late, got_late) > 0
    bench.settled()


def test_over_http(bench: Bench) -> None:
    url = f"{bench.door.url}/v1/completions"
    body = {"prompt": [1, 2, 3], "max_tokens": 100, "ignore_eos": True}

    def post(stream: bool) -> httpx.Response:
        return httpx.post(url, json={**body, "stream": stream}, timeout=60)

    with ThreadPoolExecutor(2 * OPEN) as pool:
        with bench.engine.frozen():
            asked = [pool.submit(post, stream) for stream in [False, True] * OPEN]
            wait_for(lambda: any(each.done() for each in asked) or None, "nobody is refused")
        replies = [each.result() for each in asked]
    assert {reply.status_code for reply in replies} == {200, 429}
    for reply in replies:
        if reply.status_code == 429:
            assert int(reply.headers["retry-after"]) > 0
    bench.settled()


def test_what_can_never_fit_is_refused_whatever_stage_is_there(bench: Bench) -> None:
    requests = [
        generate_request([1] * 2000, max_tokens=5),
        generate_request([1] * 5, max_tokens=5000),
    ]

    def check() -> None:
        for request in requests:
            error = refused(partial(list, bench.door.stub.Generate(request)))
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert violations(error)

    check()
    for name in ("executor-0", "scheduler"):
        bench.kill(name)
        check()
        bench.settled()
