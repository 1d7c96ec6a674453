"""Why a process ended, as a file in the run directory: for whoever says why nothing works."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from triptych.services.runtime.lifecycle import EXIT_HUNG, StartupError
from triptych.services.runtime.run_dir import RunDir

_MOST_BYTES = 2000

_log = logging.getLogger(__name__)


@contextmanager
def last_words(run_dir: RunDir, name: str) -> Iterator[None]:
    """Around the body of a process: what it raises is left behind, and goes on."""
    try:
        yield
    except StartupError as error:
        leave_words(run_dir, name, str(error))
        raise
    except Exception as error:  # the top of the process
        leave_words(run_dir, name, f"{type(error).__name__}: {error}")
        raise


def leave_words(run_dir: RunDir, name: str, words: str) -> None:
    """Say why the process `name` ends now. A full disk or a folder that is gone is no trouble."""
    line = " ".join(words.split()).encode()[:_MOST_BYTES]
    try:
        (run_dir.path / f"{name}.end").write_bytes(line)
    except OSError:
        return


def end_hung(run_dir: RunDir, name: str, words: str) -> NoReturn:
    """End this process here and now, with these words: a thread of it hangs and cannot be asked."""
    _log.critical("%s: ending", words)
    leave_words(run_dir, name, words)
    logging.shutdown()
    os._exit(EXIT_HUNG)


def take_words(run_dir: RunDir, name: str) -> str:
    """What the process `name` left, once; empty when it left nothing."""
    path = run_dir.path / f"{name}.end"
    try:
        with path.open("rb") as file:
            words = file.read(_MOST_BYTES)
        path.unlink()
    except OSError:
        return ""
    return words.decode(errors="replace")
