"""An engine's settings as commands of its processes, and what of them an operator may change."""

import os
import sys
from collections.abc import Sequence

from triptych.services.cli.child import ChildSpec
from triptych.services.cli.engine import SCHEDULER, TOKENIZER, executors, start_order
from triptych.services.cli.settings import EngineSettings
from triptych.services.executor.settings import ExecutorSettings
from triptych.services.runtime.gguf_file import open_gguf
from triptych.services.runtime.model_files import ModelFiles, resolve_model
from triptych.services.runtime.run_dir import RunDir
from triptych.services.runtime.settings import Settings, to_argv
from triptych.v1 import control_pb2


def resolved(settings: EngineSettings, run_dir: RunDir) -> tuple[EngineSettings, ModelFiles]:
    """Resolve the model once, so that the children agree on the files and none asks a hub.

    Raises StartupError.
    """
    files = resolve_model(settings.tokenizer.model)
    told = {"run_dir": str(run_dir.path), "parent_pid": os.getpid()}
    drafts = settings.executor.speculative_model
    if drafts is not None:
        drafts = str(resolve_model(drafts).path)
    told_executor = {**told, "speculative_model": drafts}
    engine = EngineSettings(
        serve=settings.serve,
        tokenizer=settings.tokenizer.model_copy(update=told),
        scheduler=settings.scheduler.model_copy(update=told),
        executor=settings.executor.model_copy(update=told_executor),
    )
    return with_model(engine, files, settings.tokenizer.served_model_name), files


def find_model(model: str) -> ModelFiles:
    """Find a model, and look whether its header can be read. May take long: it may ask a hub.

    Raises StartupError.
    """
    files = resolve_model(model)
    if files.kind == "gguf":
        open_gguf(files.path)
    return files


def with_model(
    settings: EngineSettings, files: ModelFiles, names: Sequence[str] | None
) -> EngineSettings:
    """The same engine with another model; without names it goes by its file's or folder's."""
    told = {"model": str(files.path)}
    served = {"served_model_name": tuple(names or (files.name,))}
    return EngineSettings(
        serve=settings.serve,
        tokenizer=settings.tokenizer.model_copy(update={**told, **served}),
        scheduler=settings.scheduler,
        executor=settings.executor.model_copy(update=told),
    )


def with_ports(settings: EngineSettings, tokenizer: control_pb2.TokenizerStats) -> EngineSettings:
    """The same engine; its tokenizer comes back where its clients look for it."""
    ports = {"port": _port_of(tokenizer.address)}
    if tokenizer.http_address:
        ports["http_port"] = _port_of(tokenizer.http_address)
    return EngineSettings(
        serve=settings.serve,
        tokenizer=settings.tokenizer.model_copy(update=ports),
        scheduler=settings.scheduler,
        executor=settings.executor,
    )


def specs_of(settings: EngineSettings) -> list[ChildSpec]:
    """The processes' commands, in the order to start them in."""
    by_name: dict[str, Settings] = {SCHEDULER: settings.scheduler, TOKENIZER: settings.tokenizer}
    by_name |= executor_settings(settings)
    return [_spec(name, by_name[name]) for name in names_of(settings)]


def names_of(settings: EngineSettings) -> tuple[str, ...]:
    """The processes' names, in the order to start them in."""
    return start_order(settings.executor.tensor_parallel_size)


def executor_settings(settings: EngineSettings) -> dict[str, ExecutorSettings]:
    """Those of each rank, by its process's name."""
    names = executors(settings.executor.tensor_parallel_size)
    return {
        name: settings.executor.model_copy(update={"rank": rank}) for rank, name in enumerate(names)
    }


def _spec(name: str, settings: Settings) -> ChildSpec:
    service = name.split("-", 1)[0]
    command = (sys.executable, "-m", f"triptych.services.{service}", *to_argv(settings))
    return ChildSpec(name, command)


def _port_of(address: str) -> int:
    return int(address.rsplit(":", 1)[1])
