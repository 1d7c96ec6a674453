"""What processes that were killed left in a run directory: found by their locks, and removed."""

import os
from pathlib import Path

from triptych.services.runtime.run_dir import RunDir

_CONTROL_SUFFIX = ".control.sock"
_WORDS_SUFFIX = ".end"
_SCHEDULER = "scheduler"
_ITS_SOCKETS = ("scheduler.zmq", "executor.zmq", "executor.fds", "samplers.sock")
_FIRST_RANK = "executor-0"
_GROUP_SOCKET = "executor-group.sock"
_MEETING_SUFFIX = ".meeting"


def remove_stale(run_dir: RunDir) -> list[str]:
    """Remove the sockets and last words of every process that no longer runs; their names.

    A role's files are touched while its lock is held here: never those of a process that lives, nor
    of one that starts meanwhile. Raises StartupError when a lock cannot be opened.
    """
    owned: dict[str, list[Path]] = {}
    for path in sorted(run_dir.path.iterdir()):
        role = _role(path)
        if role is not None:
            owned.setdefault(role, []).append(path)
    removed: list[str] = []
    for role, paths in owned.items():
        removed += remove_stale_of(run_dir, role, paths)
    return removed


def remove_stale_of(run_dir: RunDir, role: str, paths: list[Path] | None = None) -> list[str]:
    """The same of one role; `paths` are its files, where they are known."""
    if paths is None:
        paths = [path for path in run_dir.path.iterdir() if _role(path) == role]
    if not paths:
        return []
    lock = run_dir.claim(role)
    if lock is None:
        return []  # it lives
    try:
        for path in paths:
            path.unlink(missing_ok=True)
    finally:
        os.close(lock)
    return [path.name for path in paths]


def _role(path: Path) -> str | None:
    """Whose file it is; None when it is no socket, no last words, no ranks' meeting."""
    if path.name.endswith(_WORDS_SUFFIX):
        return path.name.removesuffix(_WORDS_SUFFIX)
    if path.name.endswith(_MEETING_SUFFIX) or path.name == _GROUP_SOCKET:
        return _FIRST_RANK
    if not path.is_socket():
        return None
    if path.name.endswith(_CONTROL_SUFFIX):
        return path.name.removesuffix(_CONTROL_SUFFIX)
    return _SCHEDULER if path.name in _ITS_SOCKETS else None
