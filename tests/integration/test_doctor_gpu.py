"""Doctor on GPUs: an nvidia-smi that says what the test wants."""

import importlib.metadata
import sys
from pathlib import Path

import pytest

from triptych.services.cli import doctor_gpu
from triptych.services.cli.doctor_checks import Finding

H200 = "NVIDIA H200, 580.65.06, 143771, 9.0"
T4 = "Tesla T4, 550.1, 15360, 7.5"


def finding(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    said: str,
    *,
    code: int = 0,
    cuda: str | None = "13.0",
    triton: bool = True,
) -> Finding:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\nexit {code}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")
    monkeypatch.setattr(doctor_gpu, "torch_cuda", lambda: cuda)

    def version(package: str) -> str:
        if package == "triton" and not triton:
            raise importlib.metadata.PackageNotFoundError
        return "3.7.1"

    monkeypatch.setattr(importlib.metadata, "version", version)
    return doctor_gpu.gpu()


def test_a_gpu_that_can_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = finding(monkeypatch, tmp_path, f"{H200}\n{T4}")
    assert (found.state, found.remedy) == ("ok", "")
    assert found.detail == (
        "NVIDIA H200, 143771 MiB, compute capability 9.0, driver 580.65.06; "
        "Tesla T4, 15360 MiB, compute capability 7.5, driver 550.1; "
        "torch 3.7.1 for CUDA 13.0, triton 3.7.1"
    )


@pytest.mark.parametrize(
    ("said", "cuda", "triton", "remedy"),
    [
        (H200, None, True, "a build of torch with CUDA"),
        (H200, "13.0", False, "install triton"),
        (T4, "13.0", True, "compute capability 8.0 or later"),
    ],
)
def test_what_is_missing_beside_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    said: str,
    cuda: str | None,
    triton: bool,
    remedy: str,
) -> None:
    found = finding(monkeypatch, tmp_path, said, cuda=cuda, triton=triton)
    assert found.state == "warn"
    assert remedy in found.remedy


def test_a_driver_that_does_not_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = finding(monkeypatch, tmp_path, "Failed to initialize NVML", code=9)
    assert (found.state, found.detail) == ("warn", "nvidia-smi: Failed to initialize NVML")


def test_a_driver_without_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert finding(monkeypatch, tmp_path, "").detail.startswith("none, though there is an NVIDIA")


def test_no_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = doctor_gpu.gpu()
    assert found.state == "ok"
    assert found.detail.startswith("none (no NVIDIA driver); torch 2.")


def test_torch_is_read_and_not_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('it was imported')\n")
    version = tmp_path / "torch" / "version.py"
    version.write_text("__version__ = '2.11.0'\ncuda: Optional[str] = '12.8'\nhip = None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    assert doctor_gpu.torch_cuda() == "12.8"
    version.write_text("cuda: Optional[str] = None\n")
    assert doctor_gpu.torch_cuda() is None
