"""Settings: where a value comes from, what is refused, and how the refusal reads."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from triptych.services.cli.settings import ServeSettings, load_engine_settings
from triptych.services.executor.settings import ExecutorSettings
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.runtime.settings import (
    ENGINE_KEYS,
    Settings,
    default_run_dir,
    load_settings,
    parse_bytes,
    to_argv,
)
from triptych.services.scheduler.settings import SchedulerSettings
from triptych.services.tokenizer.settings import TokenizerSettings

PROCESS_TYPES: tuple[type[Settings], ...]
PROCESS_TYPES = (TokenizerSettings, SchedulerSettings, ExecutorSettings)
ALL_TYPES: tuple[type[Settings], ...] = (*PROCESS_TYPES, ServeSettings)


def scheduler(*argv: str) -> SchedulerSettings:
    return load_settings(SchedulerSettings, argv, prog="test")


def executor(*argv: str) -> ExecutorSettings:
    return load_settings(ExecutorSettings, ["--model", "m", *argv], prog="test")


def refusal(settings_type: type[Settings], *argv: str) -> str:
    with pytest.raises(StartupError) as caught:
        load_settings(settings_type, argv, prog="test")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_engine_keys_are_the_union_of_all_processes_keys() -> None:
    union = {key for each in ALL_TYPES for key in each.model_fields}
    assert union == ENGINE_KEYS


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(ALL_TYPES, 2)))
def test_a_key_that_two_processes_share_means_the_same_in_both(
    one: type[Settings], other: type[Settings]
) -> None:
    for key in one.model_fields.keys() & other.model_fields.keys():
        ours, theirs = one.model_fields[key], other.model_fields[key]
        assert (ours.annotation, ours.default, ours.description, ours.metadata) == (
            theirs.annotation,
            theirs.default,
            theirs.description,
            theirs.metadata,
        )


@given(
    file=st.none() | st.integers(1, 500),
    environment=st.none() | st.integers(1, 500),
    flag=st.none() | st.integers(1, 500),
)
def test_flags_win_over_environment_over_file_over_default(
    tmp_path_factory: pytest.TempPathFactory,
    file: int | None,
    environment: int | None,
    flag: int | None,
) -> None:
    argv = []
    with pytest.MonkeyPatch.context() as patch:
        if file is not None:
            path = tmp_path_factory.mktemp("settings") / "engine.yaml"
            path.write_text(f"max_num_seqs: {file}\n")
            argv += ["--config", str(path)]
        if environment is not None:
            patch.setenv("TRIPTYCH_MAX_NUM_SEQS", str(environment))
        if flag is not None:
            argv += [f"--max-num-seqs={flag}"]
        expected = next(v for v in (flag, environment, file, 64) if v is not None)
        assert scheduler(*argv).max_num_seqs == expected


def test_the_file_may_be_named_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("num_slots: 3\n")
    monkeypatch.setenv("TRIPTYCH_CONFIG", str(path))
    assert scheduler().num_slots == 3


@pytest.mark.parametrize("settings_type", PROCESS_TYPES)
def test_settings_are_frozen(settings_type: type[Settings]) -> None:
    required = {"model": "m"} if "model" in settings_type.model_fields else {}
    settings = settings_type.model_validate(required)
    with pytest.raises(ValidationError):
        setattr(settings, "log_level", "debug")  # noqa: B010  # mypy refuses the plain form


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--max-num-seq", "3"], "unknown flag --max-num-seq; did you mean --max-num-seqs?"),
        (["--zzz"], "unknown flag --zzz"),
        (["--port=3"], "unknown flag --port"),
        (["stray"], "unexpected argument 'stray'"),
        (["--max-num-seqs"], "argument --max-num-seqs: expected one argument"),
        (
            ["--max-num-seqs", "0"],
            "max_num_seqs: '0' must be greater than or equal to 1 (--max-num-seqs)",
        ),
        (["--engine-impl", "rust"], "engine_impl: 'rust' must be 'native' or 'python'"),
        (["--num-slots", "two"], "num_slots: 'two' must be a valid integer"),
        (["--heartbeat-interval", "nan"], "heartbeat_interval: 'nan' must be"),
        (["--max-num-seqs=600"], "max_num_batched_tokens: 512 must be at least max_num_seqs (600)"),
        (["--heartbeat-timeout=1"], "heartbeat_timeout: 1 must be above heartbeat_interval (1)"),
        (["--step-timeout=1"], "step_timeout: 1 must be above heartbeat_interval (1)"),
        (["--config", "/nowhere.yaml"], "settings file /nowhere.yaml: No such file"),
    ],
)
def test_refusals_name_key_value_and_bound(argv: list[str], told: str) -> None:
    assert refusal(SchedulerSettings, *argv).startswith(told)


def test_a_required_key_is_named() -> None:
    assert refusal(TokenizerSettings) == "model: required; give --model"


def test_block_size_must_fit_the_context() -> None:
    said = refusal(ExecutorSettings, "--model=m", "--max-model-len=8")
    assert said == "block_size: 16 must be at most max_model_len (8)"


def test_an_environment_variable_that_no_process_knows_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRIPTYCH_PRT", "1")
    expected = "unknown environment variable TRIPTYCH_PRT; did you mean TRIPTYCH_PORT?"
    assert refusal(SchedulerSettings) == expected


def test_a_variable_of_another_process_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_PORT", "not even a number")
    assert scheduler().max_num_seqs == 64


def test_a_bad_variable_is_named_as_the_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_NUM_SLOTS", "99")
    assert refusal(SchedulerSettings).endswith("(TRIPTYCH_NUM_SLOTS)")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("max-num-seqs: 4", "unknown key 'max-num-seqs'; did you mean max_num_seqs?"),
        ("num_slots: 2\nnum_slots: 3", "key 'num_slots' stands twice"),
        ("- 1", "must hold `key: value` lines"),
        ("num_slots: [", "settings file"),
        ("num_slots: true", "num_slots: True is not a value for it"),
        ("3: x", "key 3 is not text"),
        ("num_slots: !!python/object/apply:os.getpid []", "could not determine a constructor"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text(text)
    assert told in refusal(SchedulerSettings, "--config", str(path))


def test_an_empty_file_and_null_values_mean_defaults(tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("")
    assert scheduler("--config", str(path)) == scheduler()
    path.write_text("num_slots: null\nport: 1\n")
    assert scheduler("--config", str(path)) == scheduler()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512MiB", 512 << 20),
        ("2GB", 2_000_000_000),
        ("1.5 GiB", 3 << 29),
        ("100", 100),
        ("7kb", 7000),
        ("3b", 3),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected
    assert executor("--kv-cache-memory", text).kv_cache_memory == expected


@pytest.mark.parametrize("text", ["-1MiB", "MiB", "1 XB", "1e9", "", "0"])
def test_bad_sizes(text: str) -> None:
    said = refusal(ExecutorSettings, "--model=m", f"--kv-cache-memory={text}")
    assert said.startswith(f"kv_cache_memory: {text!r} must be")


def test_names_are_a_list_on_flags_and_commas_in_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    argv = ["--model=m", "--served-model-name", "a", "b"]
    assert load_settings(TokenizerSettings, argv, prog="t").served_model_name == ("a", "b")
    monkeypatch.setenv("TRIPTYCH_SERVED_MODEL_NAME", "a, b")
    assert load_settings(TokenizerSettings, argv[:1], prog="t").served_model_name == ("a", "b")


@pytest.mark.parametrize(
    "settings",
    [
        TokenizerSettings(model="-odd name", served_model_name=("a", "b"), seed=5, port=0),
        SchedulerSettings(max_num_seqs=3, heartbeat_interval=0.25, engine_impl="python"),
        ExecutorSettings(model="m", kv_cache_memory=123, enforce_eager=True, cpu_threads=1),
        ExecutorSettings(model="m", max_model_len=64, enforce_eager=False, parent_pid=7),
    ],
)
def test_to_argv_says_everything(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_ENFORCE_EAGER", "true")
    monkeypatch.setenv("TRIPTYCH_PORT", "77")
    assert load_settings(type(settings), to_argv(settings), prog="test") == settings


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_settings(ExecutorSettings, ["--help"], prog="triptych executor")
    assert caught.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    for key in ExecutorSettings.model_fields.keys() - {"parent_pid", "rank"}:
        assert f"--{key.replace('_', '-')}" in said
    assert "tokens in one KV block [tokens; at least 1, at most 1024; default 16]" in said
    assert "parent" not in said
    assert "Memory:" in said


def test_the_engine_reads_the_union_and_shares_keys() -> None:
    argv = ["--model=m", "--port=0", "--max-num-seqs=2", "--block-size=8", "--run-dir=/r"]
    engine = load_engine_settings([*argv, "--heartbeat-timeout=3"], prog="triptych serve")
    assert (engine.tokenizer.model, engine.executor.model) == ("m", "m")
    assert {engine.serve.run_dir, engine.tokenizer.run_dir, engine.scheduler.run_dir} == {"/r"}
    assert engine.scheduler.heartbeat_timeout == engine.executor.heartbeat_timeout == 3
    assert (engine.tokenizer.port, engine.scheduler.max_num_seqs, engine.executor.block_size) == (
        0,
        2,
        8,
    )


def test_a_draft_model_and_its_method_go_together() -> None:
    model, method = "--speculative-model=d", "--speculative-method=draft_model"
    engine = load_engine_settings(["--model=m", model, method], prog="triptych serve")
    assert engine.executor.speculative_model == "d"
    with pytest.raises(StartupError, match=r"^speculative_model: required for .*draft_model$"):
        load_engine_settings(["--model=m", method], prog="triptych serve")
    with pytest.raises(StartupError, match=r"^speculative_model: 'd' is for .*, not off$"):
        load_engine_settings(["--model=m", model], prog="triptych serve")


def test_swap_space_needs_the_prefix_cache() -> None:
    swap = ["--model=m", "--device=emulated", "--swap-space=1MiB"]
    assert load_engine_settings(swap, prog="triptych serve").executor.swap_space == 1 << 20
    with pytest.raises(StartupError, match=r"^swap_space: 1048576 needs --enable-prefix-caching$"):
        load_engine_settings([*swap, "--no-enable-prefix-caching"], prog="triptych serve")


def test_a_graph_of_no_rows_is_refused() -> None:
    with pytest.raises(StartupError, match=r"cudagraph_capture_sizes"):
        load_engine_settings(["--model=m", "--cudagraph-capture-sizes=0,2"], prog="triptych serve")


def test_default_run_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_run_dir() == str(tmp_path / "triptych")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))
    assert default_run_dir().startswith("/tmp/triptych-")


def test_every_setting_has_help() -> None:
    fields: dict[str, Any] = {k: f for t in PROCESS_TYPES for k, f in t.model_fields.items()}
    assert all(field.description for field in fields.values())


def test_the_prompts_of_all_requests_have_room_for_the_largest_one() -> None:
    line = "max_prompt_bytes: 1048576 must be at least max_message_bytes (16777216)"
    with pytest.raises(StartupError, match=re.escape(line)):
        load_settings(
            TokenizerSettings, ["--model=m", "--max-prompt-bytes=1MiB"], prog="triptych tokenizer"
        )
