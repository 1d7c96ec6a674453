"""bench/gpu.py runs, on the emulated device and a tiny model; its figures mean nothing there."""

import json
import subprocess
import sys
from pathlib import Path

from source_tree import REPO


def test_the_whole_report_comes_out(tmp_path: Path) -> None:
    command = [
        sys.executable, "-P", "bench/gpu.py", "--device", "emulated", "--tiny", "--out",
        str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (tmp_path / "gpu.md").read_text() + "\n"
    report = json.loads((tmp_path / "gpu.json").read_text())
    plans = [("tiny", "graphs"), ("tiny", "eager"), ("tiny", "deterministic")]
    plans.append(("tiny fp8", "graphs"))
    assert [(m["model"], m["plan"]) for m in report["memory"]] == plans
    measured = [(d["model"], d["plan"], d["sequences"]) for d in report["decode"]]
    assert measured == [(*plan, sequences) for plan in plans for sequences in (1, 3)]
    assert [(p["model"], p["plan"], p["tokens"]) for p in report["prefill"]] == [
        (*plan, tokens) for plan in plans for tokens in (8, 24)
    ]
    assert all(figure["milliseconds"] > 0 for figure in report["decode"] + report["prefill"])
    assert report["facts"]["device"] == "emulated"
    assert report["targets"]
    assert report["notes"] == []


def test_what_there_is_no_time_for_is_named(tmp_path: Path) -> None:
    command = [
        sys.executable, "-P", "bench/gpu.py", "--device", "emulated", "--tiny", "--out",
        str(tmp_path), "--seconds", "0",
    ]  # fmt: skip
    subprocess.run(command, cwd=REPO, capture_output=True, check=True)
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["notes"] == [
        "tiny: left out, the time was over", "tiny fp8: left out, the time was over"
    ]  # fmt: skip
    assert report["decode"] == []
