"""What an operator gets wrong at start: one clear line, exit code 2, no traceback, no orphans."""

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from engine import alive, running_engine
from small_engines import SMALL, tiny_model

pytestmark = pytest.mark.e2e


def serve(model: Path | str, run_dir: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [
            sys.executable, "-m", "triptych.services.cli", "serve", "--model", str(model),
            "--run-dir", str(run_dir), *flags,
        ],
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip


def assert_one_clear_line(
    result: "subprocess.CompletedProcess[str]", *needles: str, code: int = 2
) -> None:
    said = result.stdout + result.stderr
    assert result.returncode == code, said
    assert "Traceback" not in said
    errors = [line for line in said.splitlines() if "error:" in line]
    assert len(errors) == 1, said
    for needle in needles:
        assert needle in errors[0], said


def test_a_missing_model_file(tmp_path: Path) -> None:
    missing = tmp_path / "nothing.gguf"
    assert_one_clear_line(serve(missing, tmp_path / "run"), "nothing.gguf")


def test_a_broken_model_file(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 64)
    assert_one_clear_line(serve(broken, tmp_path / "run"), "broken.gguf")


def test_a_weight_file_cut_short(tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model(tmp_path), tmp_path / "cut")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert_one_clear_line(serve(folder, tmp_path / "run", "--port", "0"), "model.safetensors")


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model(tmp_path), tmp_path / "pickled")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert_one_clear_line(serve(folder, tmp_path / "run", "--port", "0"), "safetensors")


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = str(holder.getsockname()[1])
        result = serve(tiny_model(tmp_path), tmp_path / "run", "--port", port)
        assert_one_clear_line(result, port)


@pytest.mark.parametrize(
    "flags", [("--max-num-seqs", "0"), ("--block-size", "-3"), ("--dtype", "int3")]
)
def test_a_bad_setting_names_itself(tmp_path: Path, flags: tuple[str, str]) -> None:
    result = serve(tmp_path, tmp_path / "run", *flags)
    assert_one_clear_line(result, flags[0].lstrip("-").replace("-", "_"))


def test_an_unknown_flag_is_refused(tmp_path: Path) -> None:
    result = serve(tmp_path, tmp_path / "run", "--max-num-sequences", "4")
    assert result.returncode == 2
    assert "--max-num-sequences" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_second_engine_in_the_same_run_directory(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    with running_engine(model, tmp_path / "run", *SMALL) as engine:
        pids = [engine.pid(name) for name in ("tokenizer-0", "scheduler", "executor-0")]
        result = serve(model, tmp_path / "run", "--port", "0")
        assert_one_clear_line(result, str(tmp_path / "run"))
        assert all(alive(pid) for pid in pids)
        assert engine.generate([1, 2, 3], max_tokens=3, temperature=0.0).completion_tokens == 3
