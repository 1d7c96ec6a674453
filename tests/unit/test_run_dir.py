"""The run directory: private, short enough for sockets, one engine in each."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from triptych.services.runtime.lifecycle import StartupError
from triptych.services.runtime.run_dir import RunDir


def test_open_creates_a_private_folder(tmp_path: Path) -> None:
    run_dir = RunDir.open(tmp_path / "a" / "b")
    assert run_dir.path.stat().st_mode & 0o777 == 0o700
    assert RunDir.open(run_dir.path) == run_dir


def test_open_refuses_a_folder_that_others_may_enter(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(StartupError, match="mode 0755"):
        RunDir.open(folder)


def test_open_refuses_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(StartupError, match="--run-dir"):
        RunDir.open(path)


def test_open_refuses_what_is_too_long_for_a_socket(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"too long for unix sockets: .* at most 107"):
        RunDir.open(tmp_path / ("x" * 100))


def test_a_lock_that_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    run_dir = RunDir.open(tmp_path / "run")
    (run_dir.path / "scheduler.lock").mkdir()
    with pytest.raises(StartupError, match=r"scheduler\.lock: .*; use another --run-dir"):
        run_dir.lock("scheduler")


def test_a_second_holder_is_refused_and_told_who_holds(tmp_path: Path) -> None:
    run_dir = RunDir.open(tmp_path / "run")
    fd = run_dir.lock("scheduler")
    with pytest.raises(StartupError, match=rf"another scheduler runs in .* \(pid {os.getpid()}\)"):
        run_dir.lock("scheduler")
    os.close(run_dir.lock("tokenizer-0"))
    os.close(fd)
    os.close(run_dir.lock("scheduler"))


def test_kill_minus_nine_frees_the_lock(tmp_path: Path) -> None:
    run_dir = RunDir.open(tmp_path / "run")
    code = (
        "import sys, time; from triptych.services.runtime.run_dir import RunDir\n"
        "fd = RunDir.open(sys.argv[1]).lock('scheduler'); print(flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(run_dir.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(StartupError, match=f"pid {holder.pid}"):
            run_dir.lock("scheduler")
        holder.kill()
    os.close(run_dir.lock("scheduler"))


def test_the_first_free_name_is_locked(tmp_path: Path) -> None:
    run_dir = RunDir.open(tmp_path / "run")
    assert run_dir.lock_first_free("tokenizer") == "tokenizer-0"
    second = run_dir.lock("tokenizer-1")
    assert run_dir.lock_first_free("tokenizer") == "tokenizer-2"
    os.close(second)
    assert run_dir.lock_first_free("tokenizer") == "tokenizer-1"
    (run_dir.path / "tokenizer-3.lock").mkdir()
    with pytest.raises(StartupError, match=r"tokenizer-3\.lock"):
        run_dir.lock_first_free("tokenizer")
