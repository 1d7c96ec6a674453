"""Settings of `triptych serve` itself; the processes' own keys stand beside them on its flags."""

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field

from triptych.services.executor.settings import ExecutorSettings
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.runtime.settings import Settings, flag, load_values
from triptych.services.scheduler.settings import SchedulerSettings
from triptych.services.tokenizer.settings import TokenizerSettings


class ServeSettings(Settings):
    """What the supervisor is told."""

    shutdown_grace: float = Field(
        default=10.0,
        ge=0,
        le=3600,
        description="time that running streams get to finish after SIGTERM",
        json_schema_extra=flag("Supervision", unit="seconds"),
    )
    startup_timeout: float = Field(
        default=600.0,
        gt=0,
        le=86400,
        description="time that the processes get to become ready",
        json_schema_extra=flag("Supervision", unit="seconds"),
    )
    max_restarts: int = Field(
        default=8,
        ge=1,
        le=1000,
        description="a process that ends so often in a row, each time within --restart-window of"
        " being ready, is in a crash loop: requests are refused with the reason, and it is tried"
        " again at --restart-delay-max",
        json_schema_extra=flag("Supervision", unit="ends"),
    )
    restart_window: float = Field(
        default=10.0,
        ge=0,
        le=86_400,
        description="a process that was ready for longer did not end in a crash loop",
        json_schema_extra=flag("Supervision", unit="seconds"),
    )
    restart_delay_max: float = Field(
        default=30.0,
        gt=0,
        le=86_400,
        description="longest wait before a process is started again; the first one is short",
        json_schema_extra=flag("Supervision", unit="seconds"),
    )
    exit_on_crash_loop: bool = Field(
        default=False,
        description="end with exit code 1 when a process is in a crash loop, for whoever restarts"
        " the whole engine",
        json_schema_extra=flag("Supervision"),
    )


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The settings of a whole engine: the supervisor's and those of its three processes."""

    serve: ServeSettings
    tokenizer: TokenizerSettings
    scheduler: SchedulerSettings
    executor: ExecutorSettings


def load_engine_settings(argv: Sequence[str] | None, *, prog: str) -> EngineSettings:
    """Read the union of all keys, flat; a key that several processes know goes to each of them.

    Raises StartupError.
    """
    values = load_values(
        [TokenizerSettings, SchedulerSettings, ExecutorSettings, ServeSettings],
        argv,
        prog=prog,
        description="Start the tokenizer, scheduler and executor processes and supervise them.",
    )
    engine = EngineSettings(
        serve=values.settings(ServeSettings),
        tokenizer=values.settings(TokenizerSettings),
        scheduler=values.settings(SchedulerSettings),
        executor=values.settings(ExecutorSettings),
    )
    if engine.executor.rank:
        raise StartupError(f"rank: {engine.executor.rank} is a flag of triptych executor only")
    if engine.executor.swap_space and not engine.scheduler.enable_prefix_caching:
        # What is in host memory is found by prefix: it would be taken, for nothing.
        raise StartupError(
            f"swap_space: {engine.executor.swap_space} needs --enable-prefix-caching"
        )
    method, model = engine.scheduler.speculative_method, engine.executor.speculative_model
    if method == "draft_model" and model is None:
        raise StartupError("speculative_model: required for --speculative-method draft_model")
    if model is not None and method != "draft_model":
        # It would be computed at every step, for nothing.
        raise StartupError(
            f"speculative_model: {model!r} is for --speculative-method draft_model, not {method}"
        )
    return engine
