"""`triptych bench simulate`: flags in, figures out."""

import io
import json
import shlex
import typing
from pathlib import Path

import pytest

from triptych.services.cli import bench
from triptych.services.cli.simulate import ProgressLine, clock, help_text
from triptych.services.cli.simulate_settings import SimulateSettings
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.runtime.settings import load_settings
from triptych.services.simulator.simulation import Progress
from triptych.services.simulator.step_cost import PROFILES, ProfileName, StepCost


def settings(*argv: str) -> SimulateSettings:
    return load_settings(SimulateSettings, argv, prog="test")


def refusal(*argv: str) -> str:
    with pytest.raises(StartupError) as caught:
        bench.run(["simulate", *argv])
    return str(caught.value)


def figures_of(path: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))["figures"]
    for name in ("scheduler", "wall_s"):
        del found[name]
    return found


def test_a_saved_trace_gives_the_same_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, first, second = (tmp_path / name for name in ("trace.jsonl", "a.json", "b.json"))
    engine = ["--num-blocks", "60", "--max-num-seqs", "8", "--queue-timeout", "5"]
    drawn = ["--requests", "120", "--request-rate", "9", "--tenants", "2", "--prefix-groups", "3"]
    assert bench.run(["simulate", *drawn, *engine, f"--save-trace={trace}", f"--json={first}"]) == 0
    assert bench.run(["simulate", *engine, "--trace", str(trace), "--json", str(second)]) == 0
    assert figures_of(first) == figures_of(second)
    assert figures_of(first)["requests"] == 120
    out = capsys.readouterr().out
    assert out.count("KV waste") == 2
    assert "tenant-2" in out
    told = json.loads(first.read_text(encoding="utf-8"))
    assert told["settings"]["max_num_seqs"] == 8
    assert told["step_cost_s"]["step"] == pytest.approx(PROFILES["smollm2-135m-cpu"].step)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--requests", "0"], "requests: '0' must be greater than or equal to 1 (--requests)"),
        (["--request-rate", "nan"], "request_rate: 'nan' must be a finite number"),
        (["--max-num-seqs", "600"], "max_num_batched_tokens: 512 must be at least max_num_seqs"),
        (["--profile", "x"], "profile: 'x' must be 'smollm2-135m-cpu' or 'llama-8b-h100'"),
        (
            ["--step-us=0", "--token-us=0", "--kv-token-us=0"],
            "step_us: 0, with token_us and kv_token_us 0: steps must take time",
        ),
        (["--trace", "a", "--save-trace", "b"], "save_trace: only of a generated trace"),
        (["--trace", "/nowhere/a"], "trace: /nowhere/a: No such file"),
        (["--json", "/nowhere/a"], "json: /nowhere/a: No such file"),
        (["--request", "3"], "unknown flag --request; did you mean"),
    ],
)
def test_what_cannot_be_run_is_one_line(argv: list[str], told: str) -> None:
    assert told in refusal(*argv)


def test_a_broken_trace_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival": 0, "prompt_tokens": 1, "output_tokens": 1}\n{}\n')
    assert f"{path}, line 2: arrival: None" in refusal("--trace", str(path))


def test_help_teaches_by_examples_that_run() -> None:
    told = help_text()
    assert "--json VALUE" in told
    assert "--json-file" not in told
    lines = [line.strip() for line in told.splitlines() if "triptych bench simulate" in line]
    examples = [shlex.split(line)[3:] for line in lines if not line.startswith("usage")]
    assert len(examples) >= 8
    for example in examples:
        kept = [each.replace("--json", "--json-file") for each in example]
        if "--config" in kept:  # a file that is not there
            at = kept.index("--config")
            del kept[at : at + 2]
        assert settings(*kept).seed == 0


def test_single_coefficients_replace_the_profile_s() -> None:
    assert settings("--profile", "llama-8b-h100").cost == PROFILES["llama-8b-h100"]
    found = settings("--token-us", "500").cost
    assert found == StepCost(
        PROFILES["smollm2-135m-cpu"].step, 0.0005, PROFILES["smollm2-135m-cpu"].kv_token
    )
    assert set(typing.get_args(ProfileName)) == set(PROFILES)


def test_the_group_lists_its_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run(["--help"]) == 0
    assert "simulate" in capsys.readouterr().out
    assert bench.run([]) == 2
    with pytest.raises(StartupError, match="unknown benchmark 'simulat'; did you mean simulate"):
        bench.run(["simulat"])


def test_progress_has_rate_and_time_left() -> None:
    out = io.StringIO()
    ProgressLine(out, lambda: 0.25).show(Progress(500, 9000, 90061.0, 10.0))
    assert out.getvalue() == (
        "simulate: 25%, 500 requests, 9,000 steps, 50 requests/s, "
        "1d 1:01:01 simulated, 0:00:30 left\n"
    )


def test_progress_on_a_terminal_leaves_nothing() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    line = ProgressLine(out, lambda: 0.0)
    line.show(Progress(0, 0, 0.0, 0.0))
    line.finish()
    assert out.getvalue().endswith("\r\x1b[2K")


def test_a_clock_counts_days() -> None:
    assert (clock(59.9), clock(3600), clock(86_400)) == ("0:00:59", "1:00:00", "1d 0:00:00")
