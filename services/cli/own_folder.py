"""A run directory for one command: it goes with it, at the latest when the next one comes."""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from triptych.services.runtime.lifecycle import StartupError
from triptych.services.runtime.run_dir import RunDir

_OWNER = "owner"
_YOUNG_SECONDS = 60.0  # its command may not have locked it yet


@contextmanager
def own_folder(prefix: str) -> Iterator[RunDir]:
    """A fresh private folder, removed at the end. Those of commands that were killed are removed at
    the start: their lock, which every command holds on its own, is free. Raises StartupError."""
    parent = Path(tempfile.gettempdir())
    with contextlib.suppress(OSError):
        _remove_left(parent, prefix)
    folder = RunDir(Path(tempfile.mkdtemp(prefix=prefix, dir=parent)))
    lock = folder.lock(_OWNER)
    try:
        yield folder
    finally:
        shutil.rmtree(folder.path, ignore_errors=True)
        os.close(lock)


def _remove_left(parent: Path, prefix: str) -> None:
    for path in parent.glob(f"{prefix}*"):
        facts = path.lstat()
        ours = path.is_dir() and not path.is_symlink() and facts.st_uid == os.geteuid()
        if not ours or time.time() - facts.st_mtime < _YOUNG_SECONDS:
            continue
        if not (path / f"{_OWNER}.lock").exists():
            continue  # no folder of this kind
        try:
            lock = RunDir(path).claim(_OWNER)
        except StartupError:
            continue
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
