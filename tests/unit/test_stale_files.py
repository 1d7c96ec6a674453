"""What killed processes leave in a run directory, and what of it may be removed."""

import os
import socket
from pathlib import Path

import pytest

from triptych.services.runtime.last_words import last_words, leave_words, take_words
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.runtime.run_dir import RunDir
from triptych.services.runtime.stale_files import remove_stale, remove_stale_of

_SOCKETS = (
    "scheduler.control.sock",
    "scheduler.zmq",
    "executor.zmq",
    "executor.fds",
    "samplers.sock",
    "executor-0.control.sock",
    "executor-group.sock",
    "tokenizer-0.control.sock",
    "tokenizer-1.control.sock",
)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir.open(tmp_path / "r")
    for name in _SOCKETS:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(run_dir.path / name))
    return run_dir


def sockets(run_dir: RunDir) -> set[str]:
    return {path.name for path in run_dir.path.iterdir() if path.is_socket()}


def test_sockets_of_whoever_is_gone_are_removed(run_dir: RunDir) -> None:
    assert set(remove_stale(run_dir)) == set(_SOCKETS)
    assert sockets(run_dir) == set()
    assert remove_stale(run_dir) == []


@pytest.mark.parametrize("living", ["scheduler", "executor-0", "tokenizer-1"])
def test_never_those_of_one_that_lives(run_dir: RunDir, living: str) -> None:
    lock = run_dir.lock(living)
    remove_stale(run_dir)
    assert sockets(run_dir) == {
        name
        for name in _SOCKETS
        if name.startswith(f"{living}.")
        or (living == "scheduler" and name.startswith(("executor.", "samplers.")))
        or (living == "executor-0" and name == "executor-group.sock")
    }
    assert (run_dir.path / f"{living}.lock").read_text() == f"{os.getpid()}\n"
    os.close(lock)


def test_of_one_role_alone(run_dir: RunDir) -> None:
    (run_dir.path / "executor-group-0123.meeting").touch()
    removed = {"executor-0.control.sock", "executor-group.sock"}
    assert set(remove_stale_of(run_dir, "executor-0")) == removed | {"executor-group-0123.meeting"}
    assert sockets(run_dir) == set(_SOCKETS) - removed


def test_what_is_no_socket_of_ours_stays(run_dir: RunDir) -> None:
    (run_dir.path / "notes.control.sock").write_text("not a socket")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(run_dir.path / "somebody.sock"))
    remove_stale(run_dir)
    left = {path.name for path in run_dir.path.iterdir() if not path.name.endswith(".lock")}
    assert left == {"notes.control.sock", "somebody.sock"}


def test_a_role_can_be_taken_while_somebody_asks_for_it(run_dir: RunDir) -> None:
    assert not run_dir.held("scheduler")
    claim = run_dir.claim("scheduler")
    assert claim is not None
    assert run_dir.held("scheduler")
    assert run_dir.claim("scheduler") is None
    os.close(claim)
    lock = run_dir.lock("scheduler")
    with pytest.raises(StartupError, match=rf"another scheduler runs .*\(pid {os.getpid()}\)"):
        run_dir.lock("scheduler")
    os.close(lock)


def test_last_words_are_said_once(run_dir: RunDir) -> None:
    with pytest.raises(StartupError), last_words(run_dir, "executor-0"):
        raise StartupError("no\nroom")
    assert take_words(run_dir, "executor-0") == "no room"
    assert take_words(run_dir, "executor-0") == ""
    with pytest.raises(KeyError), last_words(run_dir, "executor-0"):
        raise KeyError("a bug")
    assert take_words(run_dir, "executor-0") == "KeyError: 'a bug'"


def test_long_words_are_cut_and_no_folder_is_no_trouble(run_dir: RunDir) -> None:
    leave_words(run_dir, "scheduler", "x" * 100_000)
    assert len(take_words(run_dir, "scheduler")) == 2000
    leave_words(RunDir(run_dir.path / "gone"), "scheduler", "lost")


def test_words_that_nobody_took_are_stale(run_dir: RunDir) -> None:
    leave_words(run_dir, "scheduler", "old")
    assert "scheduler.end" in remove_stale(run_dir)
