"""Programs that draw tokens themselves, and vanish or sleep; executors that die beside them, and a
scheduler that stands still."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fake_executor import (
    ExecutorProcess,
    continuation,
    next_token,
)
from fake_tokenizer import FakeTokenizer
from raw_sampler import LEASE, RawSampler, by_tag, drawn_by_tag, likeliest, outside
from scheduler_bench import MakeEngine
from scheduler_process import start_scheduler, stopped
from triptych.engine_core.errors import DeadlinePassed, Unavailable
from triptych.services.runtime.run_dir import RunDir
from triptych.services.transport import fd_passing
from triptych.services.transport.rings import LogitsView
from triptych.v1 import sampler_pb2
from undisturbed import all_back, undisturbed

_SUPPORT = Path(__file__).parent.parent / "support"
_PROGRAM = """
import sys
import time
sys.path.insert(0, sys.argv[1])
from raw_sampler import LEASE, RawSampler
from triptych.services.runtime.run_dir import RunDir
sampler = RawSampler(RunDir.open(sys.argv[2]))
sampler.claim(LEASE)
print("claimed", flush=True)
for row in sampler.ready():
    sampler.draw(row, 1)
sampler.ready()
print("waits", flush=True)
time.sleep(60)
"""


# ------------------ gone or asleep


def test_a_program_that_is_killed(make_engine: MakeEngine) -> None:
    engine = make_engine(heartbeat_timeout=20)
    engine.executor()
    tokenizer = engine.tokenizer()
    with undisturbed(engine, tokenizer):
        with subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(_SUPPORT), str(engine.run_dir.path)],
            stdout=subprocess.PIPE,
            text=True,
        ) as program:
            assert program.stdout is not None
            assert program.stdout.readline() == "claimed\n"
            slot = tokenizer.submit([1, 2], 9, **outside())
            assert program.stdout.readline() == "waits\n"
            program.send_signal(signal.SIGKILL)
        tokenizer.until(lambda: tokenizer.ended(slot))
    gone = tokenizer.failed[slot]
    assert isinstance(gone, Unavailable)
    assert str(gone) == f"the sampler with the lease {LEASE} is gone: its connection ended"
    assert tokenizer.tokens[slot] == [1]
    all_back(engine)


def test_a_program_that_sleeps(make_engine: MakeEngine) -> None:
    """Each request has its time-out, from when its row was ready; late answers are nobody's."""
    engine = make_engine(sampler_timeout=1.5, heartbeat_timeout=20)
    engine.executor()
    tokenizer = engine.tokenizer()
    with undisturbed(engine, tokenizer), RawSampler(engine.run_dir) as sampler:
        sampler.claim(LEASE, 1)
        slot = tokenizer.submit([1, 2], 9, **outside())
        (row,) = sampler.ready()
        began = time.monotonic()
        sampler.draw(row, 4)
        (row,) = sampler.ready()
        tokenizer.until(lambda: tokenizer.ended(slot))
        assert time.monotonic() - began >= 1.5
        late = tokenizer.failed.pop(slot)
        assert isinstance(late, DeadlinePassed)
        assert str(late) == "sampler_timeout: 1.5 s without a token passed"
        assert tokenizer.tokens[slot] == [4]
        again = tokenizer.submit([3, 4], 9, **outside())
        sampler.draw(row, 5)
        with sampler.drawing():
            tokenizer.until(lambda: tokenizer.ended(again))
        assert tokenizer.tokens[again] == continuation([3, 4], 9)
    assert engine.stats.sampler_timeouts_total == 1
    assert engine.stats.requests_timed_out_total == 0
    all_back(engine)


def test_a_scheduler_that_stood_still(tmp_path: Path) -> None:
    """Nobody is late for that."""
    folder = tmp_path / "run"
    scheduler = start_scheduler(folder, heartbeat_timeout=20, sampler_timeout=1.5)
    executor = ExecutorProcess(folder)
    tokenizer = FakeTokenizer(RunDir.open(folder))
    try:
        tokenizer.until(lambda: tokenizer.welcomes)
        with RawSampler(RunDir.open(folder)) as sampler:
            sampler.claim(LEASE)
            slots = [tokenizer.submit([n], 3, **outside(tag=n)) for n in range(2)]
            while len(sampler.asked) < 2:
                sampler.ready()
            scheduler.send_signal(signal.SIGSTOP)
            time.sleep(2.0)
            early, late = sampler.asked
            sampler.draw(early, likeliest(sampler.logits(early), early))
            scheduler.send_signal(signal.SIGCONT)
            sampler.draw(late, likeliest(sampler.logits(late), late))
            with sampler.drawing():
                tokenizer.until(lambda: tokenizer.ended(*slots))
        for n, slot in enumerate(slots):
            assert tokenizer.tokens[slot] == continuation([n], 3)
    finally:
        said = stopped(scheduler)
        executor.kill()
        tokenizer.close()
    assert "Traceback" not in said


def test_a_program_that_reads_nothing(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing waits for it without bound: when its socket is full, it is disconnected."""
    engine = make_engine(max_num_seqs=64, max_num_batched_tokens=512, sampler_rows=33)
    engine.executor(num_blocks=128)
    tokenizer = engine.tokenizer()
    asked = 0

    def smallest_buffer(sock: socket.socket) -> int:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        return os.geteuid()

    monkeypatch.setattr(fd_passing, "_peer_uid", smallest_buffer)
    with undisturbed(engine, tokenizer), RawSampler(engine.run_dir) as sampler:
        sampler.claim(LEASE, 32)
        while not tokenizer.failed:
            slots = [tokenizer.submit([1, 2], 9, **outside()) for _ in range(16)]
            steps = engine.stats.steps_total
            tokenizer.until(lambda: engine.stats.steps_total > steps or tokenizer.failed)  # noqa: B023  # called at once
            tokenizer.abort(*slots)
            asked += len(slots)
            assert asked < 100_000
        assert all(isinstance(each, Unavailable) for each in tokenizer.failed.values())
        assert any("it does not read" in str(each) for each in tokenizer.failed.values())
        tokenizer.failed.clear()
    all_back(engine)


# ------------------ an executor


@pytest.mark.parametrize("num_blocks", [64, 80])
def test_executors_that_die(make_engine: MakeEngine, num_blocks: int) -> None:
    """No token is lost, doubled or changed: rows stay out meanwhile, and answers count. With the
    same pool as before, and with another one."""
    engine = make_engine(heartbeat_timeout=20)
    executor = engine.executor(step_seconds=0.005)
    tokenizer = engine.tokenizer()
    prompts = {tag: [tag, 2, 3] for tag in range(4)}

    def checked(logits: LogitsView, row: sampler_pb2.ReadyRow) -> int:
        tokens = prompts[row.tag] + drawn_by_tag(row.tag, row.position)
        assert int(np.argmax(logits)) == next_token(tokens)
        return by_tag(logits, row)

    with RawSampler(engine.run_dir) as sampler:
        sampler.claim(LEASE)
        with sampler.drawing(checked):
            slots = {tag: tokenizer.submit(prompts[tag], 40, **outside(tag=tag)) for tag in prompts}
            own = tokenizer.submit([9, 9], 80)
            for kill in (1, 2):
                tokenizer.until(lambda: len(tokenizer.tokens[slots[0]]) > 10 * kill)  # noqa: B023  # called at once
                executor.kill()
                engine.until(lambda: engine.stats.executors_lost_total == kill)  # noqa: B023  # called at once
                executor = engine.executor(step_seconds=0.005, num_blocks=num_blocks)
            tokenizer.until(lambda: tokenizer.ended(own, *slots.values()))
        for tag, slot in slots.items():
            assert tokenizer.tokens[slot] == drawn_by_tag(tag, 40)
        assert tokenizer.tokens[own] == continuation([9, 9], 80)
        positions = sorted((row.tag, row.position) for row in sampler.asked)
        assert positions == [(tag, position) for tag in range(4) for position in range(40)]
    all_back(engine)


def test_an_answer_while_there_is_no_executor(make_engine: MakeEngine) -> None:
    """It counts, and may be the last one."""
    engine = make_engine(heartbeat_timeout=20)
    executor = engine.executor()
    tokenizer = engine.tokenizer()
    with RawSampler(engine.run_dir) as sampler:
        sampler.claim(LEASE)
        last = tokenizer.submit([1, 2], 1, **outside(tag=1))
        (first_row,) = sampler.ready()
        more = tokenizer.submit([1, 2], 3, **outside(tag=2))
        (other_row,) = sampler.ready()
        executor.kill()
        engine.until(lambda: engine.stats.executors_lost_total == 1)
        sampler.draw(first_row, 50)
        sampler.draw(other_row, 60)
        tokenizer.until(lambda: tokenizer.ended(last) and tokenizer.tokens[more])
        assert tokenizer.tokens[last] == [50]
        assert tokenizer.tokens[more] == [60]
        engine.executor()
        with sampler.drawing():
            tokenizer.until(lambda: tokenizer.ended(more))
        assert tokenizer.tokens[more] == [60, *continuation([1, 2, 60], 2)]
        assert [(row.tag, row.position) for row in sampler.asked] == [
            (1, 0),
            (2, 0),
            (2, 1),
            (2, 2),
        ]
    all_back(engine)


def test_a_row_that_is_out_is_not_asked_for_again(make_engine: MakeEngine) -> None:
    """A new core has it computed anew; the program has it already."""
    engine = make_engine(heartbeat_timeout=20)
    executor = engine.executor()
    tokenizer = engine.tokenizer()
    with RawSampler(engine.run_dir) as sampler:
        sampler.claim(LEASE)
        slot = tokenizer.submit([1, 2], 3, **outside())
        (row,) = sampler.ready()
        executor.kill()
        tokenizer.until(lambda: not engine.stats.executor_ready)
        steps = engine.stats.steps_total
        engine.executor(num_blocks=80)
        tokenizer.until(lambda: engine.stats.steps_total > steps)
        sampler.draw(row, likeliest(sampler.logits(row), row))
        with sampler.drawing():
            tokenizer.until(lambda: tokenizer.ended(slot))
        assert tokenizer.tokens[slot] == continuation([1, 2], 3)
        assert [row.position for row in sampler.asked] == [0, 1, 2]
    all_back(engine)
