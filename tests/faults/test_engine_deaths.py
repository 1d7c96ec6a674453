"""All stages die at once, or the supervisor does: what is left, and how the next start finds it."""

import os
import signal
import socket
import stat
from contextlib import ExitStack
from pathlib import Path

import pytest

from engine import CONTROL_NAMES, Engine, alive, running_engine
from fault_asks import Seen
from fault_mix import ENGINE
from faults import KILLED_OFTEN, Bench, compare, in_decode, killed, killing, running_bench, wait_for
from second_tokenizer import NAME, second_tokenizer

pytestmark = pytest.mark.faults


def test_all_three_at_once(tmp_path: Path, rounds: range) -> None:
    with running_bench(tmp_path, *KILLED_OFTEN, seed=14) as bench:
        for _ in rounds:
            for _ in range(5):  # on a busy machine it may come when all have been answered
                mix = bench.mix()
                _, scene = bench.undisturbed(mix)
                got = bench.disturbed(scene, killing(*CONTROL_NAMES, at=in_decode))
                bench.settled()
                if any("error" in said for said in got):
                    break
            else:
                raise AssertionError("it came too late each time")
            bench.check(lambda scene: None, bench.mixer.streams(4))


def stage_pids(engine: Engine) -> list[int]:
    return [engine.pid(name) for name in CONTROL_NAMES]


def kill_supervisor(engine: Engine, pids: list[int]) -> None:
    """And wait until nothing of it runs any more."""
    os.kill(engine.process.pid, signal.SIGKILL)
    engine.process.wait(10)
    wait_for(lambda: not any(map(alive, pids)) or None, "a stage still runs")


def sockets(run_dir: Path) -> set[str]:
    return {each.name for each in run_dir.iterdir() if stat.S_ISSOCK(each.stat().st_mode)}


def test_the_supervisor_and_then_a_start_in_the_same_place(tmp_path: Path) -> None:
    """A tokenizer that nobody has killed meets the new engine, and its streams go on unchanged."""
    with ExitStack() as stack:
        stack.enter_context(killed("serve"))
        bench = stack.enter_context(running_bench(tmp_path, seed=15))
        mix = bench.mix()
        expected, scene = bench.undisturbed(mix)
        door = stack.enter_context(second_tokenizer(bench.engine, bench.model))
        dead = bench.engine.run_dir / "tokenizer-7.control.sock"
        with socket.socket(socket.AF_UNIX) as left:  # by one that died long ago
            left.bind(str(dead))
        with bench.sent(mix, scene.seen, door) as sent:
            scene.seen.wait(scene.expected_messages // 3)
            kill_supervisor(bench.engine, stage_pids(bench.engine))
            alone = sockets(bench.engine.run_dir)
            assert {dead.name, f"{NAME}.control.sock"} <= alone
            again = running_engine(bench.model, bench.engine.run_dir, *ENGINE)
            with again as engine:
                got = [each() for each in sent]
                assert compare(mix, expected, got) == []
                assert dead.name not in sockets(engine.run_dir)
                assert f"{NAME}.control.sock" in sockets(engine.run_dir)
                check_new(Bench(engine, bench.model, seed=16))
                engine.stats(NAME)


def check_new(bench: Bench) -> None:
    bench.check(lambda scene: None, bench.mixer.streams(4))
    bench.close()


def test_a_dead_supervisor_leaves_nothing_that_a_start_minds(tmp_path: Path) -> None:
    with killed("serve"), running_bench(tmp_path, seed=17) as bench:
        mix = bench.mixer.streams(8, tokens=900)
        with bench.sent(mix, seen := Seen()) as sent:
            seen.wait(50)
            pids = stage_pids(bench.engine)
            with bench.midway(8):
                kill_supervisor(bench.engine, pids)
            assert any("error" in each() for each in sent)
    with running_bench(tmp_path, seed=18) as bench:
        bench.check(lambda scene: None, bench.mixer.streams(4))
