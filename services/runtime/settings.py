"""Settings: one frozen type per process, read once from a YAML file, the environment and flags.

Flags win over the environment (`TRIPTYCH_<KEY>`), the environment wins over the file (`--config`).
Keys are flat and have one name everywhere: `max_num_seqs` in the file, `TRIPTYCH_MAX_NUM_SEQS`,
`--max-num-seqs`. A key that no process of the engine knows is refused, with the nearest known
name; in the file and the environment, which all of them can share, one that another process knows
is left to it.

This is the only module that reads the environment.
"""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from triptych.services.runtime.command_line import flag_spelling
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.runtime.settings_flags import build_parser, flag
from triptych.services.runtime.settings_sources import (
    Source,
    from_environment,
    from_file,
)

LogLevel = Literal["debug", "info", "warning", "error"]

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**n for n, letter in enumerate("kmgt", start=1)},
    **{f"{letter}ib": 1024**n for n, letter in enumerate("kmgt", start=1)},
}


def parse_bytes(value: object) -> object:
    """ "512MiB" or "2GB" to bytes; what is not text is left to the field's own check."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError("must be a size like 536870912, 512MiB or 2GB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def split_names(value: object) -> object:
    """ "a,b" to ("a", "b"): the form of a list in the environment."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Names = Annotated[tuple[str, ...], BeforeValidator(split_names)]


def default_run_dir() -> str:
    """`$XDG_RUNTIME_DIR/triptych` where that folder exists, else `/tmp/triptych-<uid>`."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")  # noqa: TID251 - this is the place
    if runtime and Path(runtime).is_dir():
        return str(Path(runtime) / "triptych")
    return f"/tmp/triptych-{os.getuid()}"


def default_weight_cache() -> str:
    """`$XDG_CACHE_HOME/triptych`, else `~/.cache/triptych`; "off" for a user without a home."""
    cache = os.environ.get("XDG_CACHE_HOME", "")  # noqa: TID251 - this is the place
    if Path(cache).is_absolute():
        return str(Path(cache) / "triptych")
    try:
        return str(Path.home() / ".cache" / "triptych")
    except RuntimeError:
        return "off"


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Within it, importing numpy starts no threads: its BLAS, which we do not use, would.

    A process with threads cannot be forked. Libraries that are imported later see nothing of it.
    """
    name = "OPENBLAS_NUM_THREADS"
    before = os.environ.get(name)  # noqa: TID251 - this is the place
    os.environ[name] = "1"  # noqa: TID251 - this is the place
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]  # noqa: TID251 - this is the place
        else:
            os.environ[name] = before  # noqa: TID251 - this is the place


class Settings(BaseModel):
    """What every process has. Immutable; each process adds its own keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    run_dir: str = Field(
        default_factory=default_run_dir,
        min_length=1,
        description="folder where the processes of one engine meet; private to its user",
        json_schema_extra=flag("Process", default="$XDG_RUNTIME_DIR/triptych or /tmp/triptych-UID"),
    )
    log_level: LogLevel = Field(
        default="info",
        description="least severe log lines to write",
        json_schema_extra=flag("Process"),
    )
    parent_pid: int | None = Field(
        default=None,
        ge=1,
        description="end when this process, the parent, ends",
        json_schema_extra=flag("Process", hidden=True),
    )


class HeartbeatSettings(Settings):
    """What the processes on either end of a connection to the scheduler have in common."""

    heartbeat_interval: float = Field(
        default=1.0,
        gt=0,
        le=60,
        description="time between heartbeats",
        json_schema_extra=flag("Supervision", unit="seconds"),
    )
    heartbeat_timeout: float = Field(
        default=10.0,
        gt=0,
        le=3600,
        description="silence after which the other side counts as dead",
        json_schema_extra=flag("Supervision", unit="seconds"),
    )

    @model_validator(mode="after")
    def _timeout_exceeds_interval(self) -> Self:
        if self.heartbeat_timeout <= self.heartbeat_interval:
            raise ValueError(
                f"heartbeat_timeout: {self.heartbeat_timeout:g} must be above heartbeat_interval "
                f"({self.heartbeat_interval:g})"
            )
        return self


class StepWatchSettings(HeartbeatSettings):
    """What the processes that make steps have in common."""

    step_timeout: float = Field(
        default=60.0,
        gt=0,
        le=86_400,
        description="a step that takes so long counts as hung: its process ends and is started"
        " again",
        json_schema_extra=flag("Supervision", unit="seconds"),
    )


class StepSizeSettings(Settings):
    """What bounds a step: for who plans it, and for who makes room for it."""

    max_num_seqs: int = Field(
        default=64,
        ge=1,
        le=4096,
        description="sequences in one step",
        json_schema_extra=flag("Scheduling", unit="sequences"),
    )
    max_num_batched_tokens: int = Field(
        default=512,
        ge=1,
        le=1 << 20,
        description="tokens computed in one step; longer prompts are prefilled in chunks",
        json_schema_extra=flag("Scheduling", unit="tokens"),
    )


# Every key that some process of the engine knows. The processes' own types cannot be imported from
# here (imports point down); tests/unit/test_settings.py keeps this list equal to their union.
ENGINE_KEYS = frozenset(
    {
        *("run_dir", "log_level", "parent_pid", "heartbeat_interval", "heartbeat_timeout"),
        *("model", "served_model_name", "host", "port", "name", "seed"),
        *("http", "http_host", "http_port", "http_max_body_bytes", "reuse_port"),
        *("vllm_grpc", "kserve_grpc"),
        *(
            "max_streams",
            "max_unread_tokens",
            "unread_timeout",
            "max_message_bytes",
            "max_prompt_bytes",
        ),
        *("tool_call_parser", "reasoning_parser", "exclude_tools_when_tool_choice_none"),
        *("max_logprobs", "structured_output_check_seconds", "structured_output_check_memory"),
        *("max_num_seqs", "max_num_batched_tokens", "max_num_waiting", "engine_impl", "num_slots"),
        *("max_num_logits", "long_prefill_token_threshold", "scheduling_policy", "watermark"),
        *("enable_prefix_caching", "queue_timeout", "request_timeout"),
        *("logprobs_mode", "logits_processors", "async_scheduling"),
        *("structured_output_cache", "structured_output_cache_bytes"),
        *("structured_output_timeout", "sampler_rows", "sampler_timeout"),
        *("speculative_method", "num_speculative_tokens", "max_num_draft_tokens"),
        *("prompt_lookup_max", "prompt_lookup_min"),
        *("dtype", "max_model_len", "block_size", "kv_cache_memory", "memory_utilization"),
        *("executor_plan", "enforce_eager", "device", "cpu_threads", "rank"),
        *("kv_cache_dtype", "weight_cache", "cpu_affinity", "cpu_isa", "activation_dtype"),
        *("quantization", "speculative_model", "tensor_parallel_size", "deterministic"),
        *("cudagraph_capture_sizes", "swap_space", "gpu_memory_utilization"),
        *("shutdown_grace", "startup_timeout", "step_timeout", "recovery_timeout"),
        *("max_restarts", "restart_window", "restart_delay_max", "exit_on_crash_loop"),
    }
)

SettingsT = TypeVar("SettingsT", bound=Settings)


def load_settings(
    settings_type: type[SettingsT], argv: Sequence[str] | None = None, *, prog: str
) -> SettingsT:
    """Read the settings of one process. `--help` prints them and exits.

    Raises StartupError (one line that names key, value and bound) for anything that is not right.
    """
    return load_values([settings_type], argv, prog=prog).settings(settings_type)


def load_values(
    settings_types: Sequence[type[Settings]],
    argv: Sequence[str] | None = None,
    *,
    prog: str,
    description: str = "",
) -> "Values":
    """Read the keys of several settings types at once, as `triptych serve` does."""
    parser = build_parser(settings_types, prog, description)
    given = parser.parse(sys.argv[1:] if argv is None else argv)
    flags = {
        key: Source(value, flag_spelling(key))
        for key, value in vars(given).items()
        if value is not None
    }
    environment = from_environment(os.environ, ENGINE_KEYS)  # noqa: TID251 - this is the place
    stated = environment | flags
    config = stated.pop("config", None)
    file = from_file(Path(str(config.value)), ENGINE_KEYS) if config is not None else {}
    return Values(file | stated)


class Values:
    """What file, environment and flags say, with where each came from; not yet checked."""

    def __init__(self, sources: dict[str, Source]) -> None:
        self._sources = sources

    def settings(self, settings_type: type[SettingsT]) -> SettingsT:
        """Check the keys of one type. Raises StartupError."""
        fields = settings_type.model_fields
        mine = {key: source for key, source in self._sources.items() if key in fields}
        for key, source in mine.items():
            if isinstance(source.value, bool) and fields[key].annotation is not bool:
                raise StartupError(f"{key}: {source.value} is not a value for it ({source.where})")
        try:
            return settings_type.model_validate({key: each.value for key, each in mine.items()})
        except ValidationError as error:
            raise StartupError("; ".join(_line(each, mine) for each in error.errors())) from None


def to_argv(settings: Settings) -> list[str]:
    """The flags that make `load_settings` return an equal value, whatever else is set."""
    argv: list[str] = []
    for key, value in settings:
        match value:
            case None:
                continue
            case bool():
                argv.append(flag_spelling(key) if value else "--no-" + flag_spelling(key)[2:])
            case tuple():
                argv += [flag_spelling(key), *value] if value else []
            case _:
                argv.append(f"{flag_spelling(key)}={value}")
    return argv


def _line(error: ErrorDetails, sources: dict[str, Source]) -> str:
    message = error["msg"].removeprefix("Value error, ")
    if not error["loc"]:
        return message  # a check across fields: it names them itself
    key = str(error["loc"][0])
    if error["type"] == "missing":
        return f"{key}: required; give {flag_spelling(key)}"
    where = f" ({sources[key].where})" if key in sources else ""
    message = message[:1].lower() + message[1:]
    message = message.replace("input should", "must")
    return f"{key}: {error['input']!r} {message}{where}"


__all__ = [
    "ENGINE_KEYS",
    "Bytes",
    "HeartbeatSettings",
    "LogLevel",
    "Names",
    "Settings",
    "StepSizeSettings",
    "StepWatchSettings",
    "Values",
    "default_run_dir",
    "default_weight_cache",
    "flag",
    "load_settings",
    "load_values",
    "one_blas_thread",
    "to_argv",
]
