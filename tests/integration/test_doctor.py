"""Doctor: each check well and ill, and what it tells the operator."""

import errno
import gc
import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from triptych.services.cli import doctor
from triptych.services.cli import doctor_checks as checks
from triptych.services.cli.doctor_checks import Finding
from triptych.services.runtime.run_dir import RunDir

_MODEL = Path(__file__).parents[2] / ".models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_what_this_machine_has() -> None:
    for check in (checks.python, checks.dependencies, checks.native_modules, checks.shared_memory):
        assert check().state == "ok", check


def test_an_old_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 1))
    assert checks.python().state == "fail"


def test_packages_out_of_range(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = ["torch>=99", "no-such-package>=1", 'triton>=3; extra == "cuda"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda _name: needs)
    finding = checks.dependencies()
    assert finding.state == "fail"
    assert "is not >=99; no-such-package>=1 is missing" in finding.detail
    assert "triton" not in finding.detail
    assert finding.remedy


def test_a_module_that_was_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triptych.kernels.cpu._cpu", None)
    finding = checks.native_modules()
    assert finding.state == "fail"
    assert "C++17" in finding.remedy


@pytest.mark.parametrize(
    ("flags", "state"), [("fpu avx2 fma", "ok"), ("fpu sse2", "warn"), ("", "warn")]
)
def test_instruction_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, state: str
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor : 0\nflags\t\t: {flags}\n")
    assert checks.instruction_sets(cpuinfo).state == state


def test_no_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_name: str, _flags: int) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    finding = checks.shared_memory()
    assert finding.state == "fail"
    assert "Operation not permitted" in finding.detail


def test_shared_memory_leaves_no_descriptor_open() -> None:
    gc.collect()  # what earlier tests left to the collector must not go in the middle of this one
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # a count, not paths
    checks.shared_memory()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        finding = checks.port("127.0.0.1", port)
    assert (finding.state, "--port" in finding.remedy) == ("warn", True)
    assert checks.port("127.0.0.1", port).state == "ok"


def test_run_directories(tmp_path: Path) -> None:
    run_dir = RunDir.open(tmp_path / "run")
    assert checks.run_directory(str(run_dir.path)).state == "ok"
    lock = run_dir.lock("supervisor")
    assert checks.run_directory(str(run_dir.path)).state == "warn"
    os.close(lock)
    run_dir.path.chmod(0o755)
    assert checks.run_directory(str(run_dir.path)).state == "fail"


def test_a_run_directory_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    finding = checks.run_directory(str(tmp_path / "a" / "run"))
    assert finding.state == "ok"
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").touch(mode=0o444)
    assert checks.run_directory(str(tmp_path / "file" / "run")).state == "fail"


def test_model_files(tmp_path: Path) -> None:
    finding = checks.model_files(str(tmp_path / "gone.gguf"))
    assert finding.state == "fail"
    assert "gone.gguf" in finding.detail


def test_an_unexpected_system_error_is_a_failed_line() -> None:
    def broken() -> Finding:
        raise OSError(errno.EIO, "disk on fire")

    finding = checks.guarded("disk", broken)
    assert (finding.what, finding.state) == ("disk", "fail")
    assert "disk on fire" in finding.detail


def test_without_a_model_the_generation_is_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.run(["--run-dir", str(tmp_path / "run"), "--port", "0"]) == 0
    assert "warn generation" in capsys.readouterr().out


def test_a_failing_line_says_what_to_do_and_the_exit_code_is_1(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "triptych.services.cli", "doctor", "--port", "0"]
    command += ["--run-dir", str(tmp_path / "run"), "--model", str(tmp_path / "gone.gguf")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 1
    lines = ended.stdout.splitlines()
    failed = [n for n, line in enumerate(lines) if line.startswith("fail")]
    assert [lines[n].split()[1] for n in failed] == ["model", "generation"]
    assert all(lines[n + 1].startswith("      -> ") for n in failed)
    assert ended.stderr == ""


@pytest.mark.e2e
@pytest.mark.smollm
def test_a_real_generation(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "triptych.services.cli", "doctor", "--port", "0"]
    command += ["--run-dir", str(tmp_path / "run"), "--model", str(_MODEL)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1].startswith("ok   generation")
