"""SIGTERM: no new work, the streams that run finish within the grace, then everything ends."""

import signal
from pathlib import Path

import grpc
import httpx
import pytest

from engine import CONTROL_NAMES, alive, generate_request, is_serving, stop
from fault_asks import Seen
from faults import Bench, compare, running_bench, wait_for
from grpc_errors import as_error, refused

pytestmark = pytest.mark.faults


def check_refuses(bench: Bench) -> None:
    """It takes nothing new, over gRPC and HTTP, and says so."""
    assert not is_serving(bench.door.address)
    error = refused(lambda: list(bench.door.stub.Generate(generate_request([1], max_tokens=1))))
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    body = {"prompt": [1], "max_tokens": 1}
    reply = httpx.post(f"{bench.door.url}/v1/completions", json=body, timeout=10)
    assert reply.status_code == 503
    assert int(reply.headers["retry-after"]) > 0
    assert httpx.get(f"{bench.door.url}/health", timeout=10).status_code == 503


@pytest.mark.parametrize("victim", [None, "executor-0", "scheduler"])
def test_streams_finish_within_the_grace(tmp_path: Path, victim: str | None) -> None:
    """Also when a stage dies meanwhile."""
    with running_bench(tmp_path, "--shutdown-grace", "60", seed=25) as bench:
        mix = bench.mixer.streams(10, tokens=600)
        expected, scene = bench.undisturbed(mix)
        pids = [bench.pid(name) for name in CONTROL_NAMES]
        with bench.sent(mix, scene.seen) as sent:
            scene.seen.wait(100)
            with bench.midway(1):
                bench.engine.process.send_signal(signal.SIGTERM)
                wait_for(lambda: not is_serving(bench.door.address) or None, "it still serves")
                check_refuses(bench)
                if victim is not None:
                    bench.kill(victim)
            got = [each() for each in sent]
        assert compare(mix, expected, got) == []
        assert bench.engine.process.wait(60) == 0
        assert not any(map(alive, pids))


def test_a_grace_that_is_too_short(tmp_path: Path) -> None:
    """What is cut off is told so, once."""
    with running_bench(tmp_path, "--shutdown-grace", "0.3", seed=26) as bench:
        mix = bench.mixer.streams(40, tokens=900)
        with bench.sent(mix, seen := Seen()) as sent:
            seen.wait(100)
            assert stop(bench.engine) == 0
            got = [each() for each in sent]
    errors = [said["error"] for said in got if "error" in said]
    assert errors
    assert all(isinstance(error, grpc.RpcError) for error in errors), errors
    codes = {as_error(error).code() for error in errors if isinstance(error, grpc.RpcError)}
    assert codes <= {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
