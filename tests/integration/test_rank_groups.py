"""Ranks of an executor meet in a run directory, sum, and end together."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import rank_process
from triptych.services.runtime.last_words import take_words
from triptych.services.runtime.lifecycle import EXIT_GROUP, EXIT_STARTUP
from triptych.services.runtime.run_dir import RunDir

WAIT = 60.0


class Rank:
    """A process of rank_process.py."""

    def __init__(self, run_dir: RunDir, rank: int, size: int, **options: object) -> None:
        flags = [f"--{name}={value}" for name, value in options.items()]
        self._process = subprocess.Popen(
            [
                sys.executable, rank_process.__file__, f"--run-dir={run_dir.path}",
                f"--rank={rank}", f"--size={size}", *flags,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip

    def line(self) -> str:
        """The next line that it prints; empty when it ended."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def hears(self, words: str) -> None:
        """Wait until its log has the words."""
        assert self._process.stderr is not None
        for said in self._process.stderr:
            if words in said:
                return
        raise AssertionError(f"it never said {words!r}")

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def tell(self, *lines: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.writelines(f"{line}\n" for line in lines)
        self._process.stdin.flush()

    def obeys(self, *lines: str) -> None:
        for line in lines:
            self.tell(line)
            assert self.line() == "ok"

    def leave(self) -> None:
        self.tell("leave")

    def ended(self) -> tuple[int, str]:
        """Its exit code, and what of its log nobody has read."""
        assert self._process.stderr is not None
        self._process.wait(WAIT)
        return self._process.returncode, self._process.stderr.read()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Ranks:
    """Starts them, and ends them all."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = RunDir.open(folder)
        self._all: list[Rank] = []

    def start(self, rank: int, size: int, **options: object) -> Rank:
        self._all.append(Rank(self.run_dir, rank, size, **options))
        return self._all[-1]

    def all_there(self, size: int, then: str = "meet") -> list[Rank]:
        ranks = [self.start(rank, size, then=then) for rank in range(size)]
        assert [rank.line() for rank in ranks] == ["there"] * size
        return ranks

    def close(self) -> None:
        for rank in self._all:
            rank.close()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path / "run")
    yield ranks
    ranks.close()


def test_sums_are_the_same_on_all_ranks_and_for_all_batches(ranks: Ranks) -> None:
    three = [ranks.start(rank, 3, then="sums") for rank in range(3)]
    said = [[rank.line() for _ in range(7)] for rank in three]
    assert said[0] == said[1] == said[2]
    assert said[0][-1] == "done"
    for dtype in (said[0][:3], said[0][3:6]):
        one, some, all_of_them = (line.split()[-1] for line in dtype)
        row = len(one)
        assert all_of_them.startswith(some)
        assert some[3 * row : 4 * row] == one


def test_a_rank_may_be_late_and_come_before_rank_0(ranks: Ranks) -> None:
    last = ranks.start(2, 3)
    last.hears("waiting for rank 0")
    first = ranks.start(0, 3)
    first.hears("rank 2 is there")
    middle = ranks.start(1, 3)
    assert [rank.line() for rank in (first, middle, last)] == ["there"] * 3
    assert not ranks.run_dir.executor_group.exists()


def test_what_a_killed_rank_0_left_is_in_nobodys_way(ranks: Ranks) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stale:
        stale.bind(str(ranks.run_dir.executor_group))
    left = ranks.run_dir.path / "executor-group-0123.meeting"
    left.touch()
    late = ranks.start(1, 2)
    late.hears("waiting for rank 0")
    first = ranks.start(0, 2)
    assert first.line() == late.line() == "there"
    assert not left.exists()


def test_whoever_ends_before_all_are_there_is_waited_for_again(ranks: Ranks) -> None:
    first, middle = ranks.start(0, 3), ranks.start(1, 3)
    first.hears("rank 1 is there")
    middle.signal(signal.SIGKILL)
    first.hears("rank 1 has gone again")
    middle.ended()
    middle = ranks.start(1, 3)
    first.hears("rank 1 is there")
    first.signal(signal.SIGKILL)
    first.ended()
    first, last = ranks.start(0, 3), ranks.start(2, 3)
    assert [rank.line() for rank in (first, middle, last)] == ["there"] * 3


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"fingerprint": "other"}, "model: rank 1 has other, rank 0 print"),
        ({"setting": "32"}, "block_size: 32 of rank 1, 1 of rank 0"),
    ],
)
def test_a_rank_that_does_not_fit_is_refused_by_name(
    ranks: Ranks, options: dict[str, object], reason: str
) -> None:
    first = ranks.start(0, 2)
    code, said = ranks.start(1, 2, **options).ended()
    assert code == EXIT_STARTUP
    assert f"triptych executor: error: rank 0 refused: {reason}" in said
    fitting = ranks.start(1, 2)
    assert first.line() == fitting.line() == "there"


def test_another_number_of_ranks_is_refused(ranks: Ranks) -> None:
    ranks.start(0, 2)
    code, said = ranks.start(1, 3).ended()
    assert code == EXIT_STARTUP
    assert "tensor_parallel_size: 3 of rank 1, 2 of rank 0" in said


def test_who_is_missing_is_named_to_all(ranks: Ranks) -> None:
    middle = ranks.start(2, 4)
    middle.hears("waiting for rank 0")
    first = ranks.start(0, 4, timeout=3)
    for rank in (first, middle):
        code, said = rank.ended()
        assert code == EXIT_STARTUP
        assert "ranks 1 and 3 of 4 have not come to" in said
        assert "triptych executor --rank R --tensor-parallel-size 4" in said


def test_a_missing_rank_0_is_named(ranks: Ranks) -> None:
    code, said = ranks.start(1, 2, timeout=0.5).ended()
    assert code == EXIT_STARTUP
    assert "rank 0 of 2 has not come to" in said


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_the_end_of_one_is_the_end_of_all(ranks: Ranks, victim: int) -> None:
    three = ranks.all_there(3)
    three[victim].signal(signal.SIGKILL)
    for number, rank in enumerate(three):
        code, said = rank.ended()
        if number != victim:
            assert code == EXIT_GROUP
            cause = victim if 0 in (number, victim) else 0
            assert said.splitlines()[-1] == f"rank {cause} is gone: ending"
            assert take_words(ranks.run_dir, f"executor-{number}") == said.splitlines()[-1]


@pytest.mark.parametrize("victim", [0, 1])
def test_also_of_one_that_hangs_in_a_collective(ranks: Ranks, victim: int) -> None:
    two = ranks.all_there(2, then="hang")
    time.sleep(0.2)  # it is in its sum, or on its way
    two[victim].signal(signal.SIGKILL)
    code, said = two[1 - victim].ended()
    assert code == EXIT_GROUP
    assert said.splitlines()[-1] == f"rank {victim} is gone: ending"
    assert "Traceback" not in said


def test_whoever_stops_is_not_dead(ranks: Ranks) -> None:
    two = ranks.all_there(2)
    two[0].leave()
    assert two[0].ended()[0] == os.EX_OK
    code, said = two[1].ended()
    assert code == EXIT_GROUP
    assert "rank 0 has stopped: ending" in said


def test_ranks_that_stop_together_end_well(ranks: Ranks) -> None:
    three = ranks.all_there(3)
    for rank in three:
        rank.leave()
    assert [rank.ended()[0] for rank in three] == [os.EX_OK] * 3
    assert {path.suffix for path in ranks.run_dir.path.iterdir()} == {".lock"}


@pytest.mark.parametrize("behind", [0, 1])
def test_a_step_that_only_some_were_given_is_the_end(ranks: Ranks, behind: int) -> None:
    """The scheduler died between the two: one hangs in the step, the other joins the next."""
    two = ranks.all_there(2)
    for rank in two:
        rank.obeys("begin 5", "take 1", "take 2")
    two[1 - behind].obeys("take 3")
    two[behind].obeys("over")
    code, said = two[1 - behind].ended()
    assert code == EXIT_GROUP
    assert said.splitlines()[-1] == f"rank {behind} was not given step 3: ending"


def test_also_one_that_is_taken_later(ranks: Ranks) -> None:
    two = ranks.all_there(2)
    two[1].obeys("begin 5", "take 1", "over")
    two[0].obeys("begin 5", "take 1")
    time.sleep(0.2)  # it has heard of that
    two[0].tell("take 2")
    assert two[0].ended()[0] == EXIT_GROUP


def test_sessions_that_end_alike_end_nobody(ranks: Ranks) -> None:
    two = ranks.all_there(2)
    for ring in ("5", "6"):
        for rank in two:
            rank.obeys(f"begin {ring}", "take 1", "take 2", "over")
        time.sleep(0.1)
    for rank in two:
        rank.leave()
    assert [rank.ended()[0] for rank in two] == [os.EX_OK] * 2
