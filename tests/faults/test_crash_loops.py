"""A stage that cannot be kept running: all are told why, and it recovers when the cause goes."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from engine import generate_request, is_serving
from fault_asks import Seen
from faults import Bench, killed, running_bench, wait_for
from grpc_errors import as_error, refused
from triptych.v1 import control_pb2

pytestmark = pytest.mark.faults

FLAGS = ("--max-restarts", "2", "--restart-window", "3", "--restart-delay-max", "0.5")
LOOP = control_pb2.StageState.STATE_CRASH_LOOP
READY = control_pb2.StageState.STATE_READY


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with running_bench(tmp_path, *FLAGS, seed=28) as bench:
        yield bench


def break_weights(bench: Bench) -> Path:
    """Cut the file short; the whole one stays beside it, and in the executor that runs."""
    weights = bench.model / "model.safetensors"
    whole = weights.with_suffix(".whole")
    weights.rename(whole)
    weights.write_bytes(whole.read_bytes()[:-1000])
    return whole


def mend_weights(bench: Bench) -> None:
    weights = bench.model / "model.safetensors"
    weights.with_suffix(".whole").replace(weights)


def check_told(bench: Bench, reason: str) -> None:
    """Health and every new request say what the matter is, at once."""
    assert not is_serving(bench.door.address)
    error = refused(lambda: list(bench.door.stub.Generate(generate_request([1], max_tokens=1))))
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert reason in error.details()
    body = {"prompt": [1], "max_tokens": 1}
    reply = httpx.post(f"{bench.door.url}/v1/completions", json=body, timeout=10)
    assert reply.status_code == 503
    assert reason in reply.text
    health = httpx.get(f"{bench.door.url}/health", timeout=10)
    assert health.status_code == 503
    assert reason in health.text


def test_weights_that_are_broken_at_a_restart(bench: Bench) -> None:
    mix = bench.mixer.streams(6, tokens=900)
    bench.undisturbed(mix)
    break_weights(bench)
    with bench.sent(mix, seen := Seen()) as sent:
        seen.wait(60)
        with bench.midway(1):
            bench.kill("executor-0")
        told = [each() for each in sent]  # nobody waits for what will not come
    wait_for(lambda: bench.engine.stage("executor-0").state == LOOP or None, "no crash loop")
    errors = [said["error"] for said in told if "error" in said]
    assert errors
    for error in errors:
        assert isinstance(error, grpc.RpcError), error
        assert as_error(error).code() == grpc.StatusCode.UNAVAILABLE
        assert "model.safetensors" in as_error(error).details()
    assert "model.safetensors" in bench.engine.stage("executor-0").reason
    check_told(bench, "model.safetensors")
    mend_weights(bench)
    wait_for(lambda: is_serving(bench.door.address) or None, "it does not recover")
    bench.check(lambda scene: None)
    wait_for(lambda: bench.engine.stage("executor-0").state == READY or None, "still a crash loop")


def test_killed_too_often(bench: Bench) -> None:
    """A process that does not live for long is in a crash loop too, whoever ends it."""
    (pid,) = bench.kill("scheduler")
    bench.successor("scheduler", pid)
    bench.kill("scheduler")
    wait_for(lambda: bench.engine.stage("scheduler").state == LOOP or None, "no crash loop")
    bench.settled()  # it is tried again, now and then
    bench.check(lambda scene: None, bench.mixer.streams(4))


def test_an_engine_that_ends_then(tmp_path: Path) -> None:
    with killed("serve", 1), running_bench(tmp_path, *FLAGS, "--exit-on-crash-loop") as bench:
        break_weights(bench)
        bench.kill("executor-0")
        bench.engine.process.wait(30)
