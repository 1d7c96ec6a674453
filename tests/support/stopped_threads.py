"""One thread of another process is stopped, as if the call that it is in never came back.

SIGSTOP stops all threads of a process; ptrace stops one, and the others go on. The kernel allows it
for our own descendants, unless it is set otherwise (`can_stop_threads`).
"""

import ctypes
import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PTRACE_SEIZE, _PTRACE_INTERRUPT, _PTRACE_DETACH = 0x4206, 0x4207, 17
_WALL = 0x40000000
_BUSY_SECONDS = 0.1


def _ptrace(request: int, tid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    if libc.ptrace(request, tid, None, None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"thread {tid}")


def can_stop_threads() -> bool:
    """Whether this machine allows it."""
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    ) as child:
        try:
            with stopped_thread(child.pid):
                return True
        except PermissionError:
            return False


def busiest_thread(pid: int) -> int:
    """The thread that computes most just now. Raises FileNotFoundError when the process is gone."""
    before = _used(pid)
    time.sleep(_BUSY_SECONDS)
    after = _used(pid)
    return max(after, key=lambda tid: after[tid] - before.get(tid, 0))


def hardest_worker(pid: int) -> int:
    """The thread that has computed most so far. Raises FileNotFoundError, as `busiest_thread`."""
    used = _used(pid)
    return max(used, key=lambda tid: used[tid])


def _used(pid: int) -> dict[int, int]:
    """Of each thread, nanoseconds on a core."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            found[int(task.name)] = int((task / "schedstat").read_text().split()[0])
    return found


@contextmanager
def stopped_thread(tid: int) -> Iterator[None]:
    """Within, the thread stands still; it may be killed meanwhile. Raises PermissionError."""
    stopped, release = threading.Event(), threading.Event()
    failed: list[OSError] = []

    def hold() -> None:  # all that is asked of ptrace must come from one thread
        try:
            _ptrace(_PTRACE_SEIZE, tid)
            _ptrace(_PTRACE_INTERRUPT, tid)
        except OSError as error:
            failed.append(error)
            stopped.set()
            return
        gone = False
        while not release.is_set() and not gone:
            # The end of a thread that is traced is told to us first, and waits until we have heard.
            status = _wait(tid)
            if status is not None:
                gone = not os.WIFSTOPPED(status)
                stopped.set()
            release.wait(0.005)
        if not gone:
            _detach(tid)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    try:
        stopped.wait()
        if failed:
            raise failed[0]
        yield
    finally:
        release.set()
        thread.join()


def _wait(tid: int) -> int | None:
    """What became of it since the last time: a wait status; None for nothing."""
    try:
        found, status = os.waitpid(tid, os.WNOHANG | _WALL)
    except ChildProcessError:
        return 0
    return status if found else None


def _detach(tid: int) -> None:
    try:
        _ptrace(_PTRACE_DETACH, tid)
    except OSError as error:
        if error.errno != errno.ESRCH:
            raise
