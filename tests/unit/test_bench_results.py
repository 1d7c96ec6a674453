"""The one form of the benchmarks' results."""

import json
from pathlib import Path

import pytest

from bench_modules import load_bench_module

results = load_bench_module("results")


def test_figures_are_printed_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "ROOT", tmp_path)
    found = results.Results("bench-some")
    found.figure("fast", 2.0, 1.0, 2.0, 1.5, met=True)
    found.beside("shown", 0.5, 2.0)
    found.figure("slow", 1.0, 1.0, 1.0, 1.5, met=False)
    assert capsys.readouterr().out.splitlines() == [
        "fast 2 1 2.000 1.5", "shown 0.5 2 0.250 -", "slow 1 1 1.000 1.5  missed",
    ]  # fmt: skip
    path = found.write()
    assert path == tmp_path / "build" / "results" / "bench-some.json"
    document = json.loads(path.read_text())
    assert document["figures"]["shown"] == {
        "ours": 0.5, "peer": 2.0, "ratio": 0.25, "target": None, "met": True,
    }  # fmt: skip
    assert document["figures"]["slow"]["met"] is False
    assert {"commit", "command", "machine"} < document.keys()


def test_a_figure_without_a_target_fails_nothing() -> None:
    found = results.Results("bench-some")
    assert not found.met
    found.beside("shown", 100.0, 1.0)
    assert found.met
    found.figure("slow", 1.0, 1.0, 1.0, 1.5, met=False)
    assert not found.met


def test_a_figure_is_measured_once() -> None:
    found = results.Results("bench-some")
    found.beside("shown", 1.0, 1.0)
    with pytest.raises(AssertionError, match="twice"):
        found.beside("shown", 1.0, 1.0)
