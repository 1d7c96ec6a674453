"""`python -m triptych.services.tokenizer`: the tokenizer process."""

import asyncio
import sys

import uvloop

from triptych.services.runtime.last_words import last_words
from triptych.services.runtime.lifecycle import (
    StartupError,
    begin_start,
    bind_to_parent,
    end_start,
    on_stop_signal,
    run_main,
)
from triptych.services.runtime.logging import configure_logging
from triptych.services.runtime.model_files import fingerprint, resolve_model
from triptych.services.runtime.run_dir import RunDir
from triptych.services.runtime.settings import load_settings
from triptych.services.tokenizer.server import LoadedModel, TokenizerService, until_done
from triptych.services.tokenizer.settings import TokenizerSettings
from triptych.services.tokenizer.tokenizer import load_tokenizer

_PROG = "triptych tokenizer"


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT. Returns the exit code: 0, or 2 after one line on stderr."""
    begin_start()
    return run_main("tokenizer", lambda: _run(load_settings(TokenizerSettings, argv, prog=_PROG)))


def run(settings: TokenizerSettings) -> int:
    """`main` for settings that have been read: where a supervisor has forked this process."""
    return run_main("tokenizer", lambda: _run(settings))


def _run(settings: TokenizerSettings) -> None:
    bind_to_parent(settings.parent_pid)
    run_dir = RunDir.open(settings.run_dir)
    name, is_locked = settings.name, False
    if name == "auto":
        name, is_locked = run_dir.lock_first_free("tokenizer"), True
        settings = settings.model_copy(update={"name": name})
    configure_logging(settings.log_level, name)
    with last_words(run_dir, name):
        if not is_locked:
            run_dir.lock(name)  # until the process ends
        files = resolve_model(settings.model)
        model = LoadedModel(
            tokenizer=load_tokenizer(files),
            fingerprint=fingerprint(files),
            names=settings.served_model_name or (files.name,),
            path=files.path,
        )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, run_dir, model))


async def _serve(settings: TokenizerSettings, run_dir: RunDir, model: LoadedModel) -> None:
    stopping = asyncio.Event()
    on_stop_signal(stopping.set, asyncio.get_running_loop())
    service = TokenizerService(settings, run_dir, model)
    try:
        await service.start()
        end_start()
        refusal = await until_done(stopping, service.client.ended)
    except BaseException:
        await service.stop(0.0)
        raise
    await service.stop(0.0 if refusal is not None else settings.shutdown_grace)
    if refusal is not None:
        raise StartupError(f"the scheduler refuses this process: {refusal}")


if __name__ == "__main__":
    sys.exit(main())
