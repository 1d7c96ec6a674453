"""The `triptych` command. It imports nothing but the chosen command, so that help is instant."""

import difflib
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import cast

from triptych.services.runtime.lifecycle import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_STARTUP,
    StartupError,
    begin_start,
    print_error,
    run_main,
)

_CLI = "triptych.services.cli"
_COMMANDS: dict[str, tuple[str, str]] = {
    # name: (module with `run(argv) -> int`, what it does)
    "serve": (f"{_CLI}.serve", "start the three processes and supervise them"),
    "chat": (f"{_CLI}.chat", "talk with the model of a running engine"),
    "generate": (f"{_CLI}.generate", "complete a prompt with a running engine"),
    "health": (f"{_CLI}.health", "say whether a running engine serves"),
    "control": (f"{_CLI}.control", "drain, restart, load or unload a running engine"),
    "doctor": (f"{_CLI}.doctor", "check this machine, then make one real generation"),
    "demo": (f"{_CLI}.demo", "start an engine, ask it one question, stop it"),
    "bench": (f"{_CLI}.bench", "measure without a model: simulate the scheduler"),
    "tokenizer": ("triptych.services.tokenizer.__main__", "run the tokenizer process alone"),
    "scheduler": ("triptych.services.scheduler.__main__", "run the scheduler process alone"),
    "executor": ("triptych.services.executor.__main__", "run the executor process alone"),
}
_PROCESSES = ("serve", "demo", "doctor", "tokenizer", "scheduler", "executor")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0 well, 1 failed, 2 refused with one line on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        code = EXIT_OK if arguments else EXIT_STARTUP
        return run_main("", lambda: _while_read("", lambda: _print(_help(), code)))
    command, rest = arguments[0], arguments[1:]
    if command in ("--version", "version"):
        from triptych import __version__

        said = f"triptych {__version__}"
        return run_main("", lambda: _while_read("", lambda: _print(said, EXIT_OK)))
    if command not in _COMMANDS:
        return run_main("", lambda: _unknown(command))
    module = _COMMANDS[command][0]
    if command in _PROCESSES:
        begin_start()
    if module.endswith(".__main__"):
        # A process has a `main` of its own, which reports its own errors.
        return cast(int, importlib.import_module(module).main(rest))
    return run_main(command, lambda: _while_read(command, lambda: _body(module)(rest)))


def _while_read(command: str, body: Callable[[], int]) -> int:
    """Run a command until the reader of its output goes, as `head` does: then end as cat would.

    An output that cannot be written for another reason is one line.
    """
    try:
        code = body()
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if not _output_fails():
            raise
        _discard_output()
        print_error(command, f"standard output: {error.strerror}")
        return EXIT_FAILED
    return code


def _output_fails() -> bool:
    """Whether it was the output that failed: then it fails again."""
    try:
        print(flush=True)
    except OSError:
        return True
    return False


def _discard_output() -> None:
    """What is still buffered has nowhere to go; the interpreter would say so at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _print(text: str, code: int) -> int:
    print(text)
    return code


def _body(module: str) -> Callable[[Sequence[str]], int]:
    return cast(Callable[[Sequence[str]], int], importlib.import_module(module).run)


def _unknown(command: str) -> int:
    close = difflib.get_close_matches(command, _COMMANDS, n=1)
    hint = f"; did you mean {close[0]}?" if close else "; see triptych --help"
    raise StartupError(f"unknown command {command!r}{hint}")


def _help() -> str:
    lines = [f"  {name:<10} {what}" for name, (_, what) in _COMMANDS.items()]
    return "\n".join(
        [
            "usage: triptych COMMAND [--flags]",
            "",
            "An LLM inference engine in three processes: tokenizer, scheduler, executor.",
            "",
            *lines,
            f"  {'version':<10} print the version",
            "",
            "triptych COMMAND --help explains its flags.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
