"""Children that are forked rather than started anew: they share what their parent has imported.

Imports are most of what a process does until it is ready, and four processes on few cores would
each do the same ones. The parent imports what its children have in common, once, and forks. What
makes a fork safe is checked and not hoped for: the parent has one thread, so no lock is held by
somebody who is not there in the child. Libraries that start threads when they are used (grpc,
ZeroMQ) are imported before, and used only after.

A child leaves through `os._exit`: the parent's frames and exit handlers are not its own, and what
still runs on its threads nobody waits for.
"""

import ctypes
import gc
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

from triptych.services.runtime.lifecycle import EXIT_FAILED

_PR_SET_NAME = 15


def single_threaded() -> bool:
    """Whether this process has one thread, native ones counted: then it may be forked."""
    return len(list(Path("/proc/self/task").iterdir())) == 1


def fork_child(name: str, body: Callable[[], int], close: Iterable[int] = ()) -> int:
    """Fork a process that runs `body` and exits with what it returns; the child's pid.

    It gets a session and a name of its own, an empty standard input, and none of the descriptors
    `close`. Everything else that is open is the child's too: descriptors are few before the event
    loop runs. Raises OSError, and AssertionError in a process with threads.
    """
    if not single_threaded():
        raise AssertionError("fork_child needs a process with one thread")
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # what is buffered would be written twice
    gc.freeze()  # a collection in the child would write to, and so copy, every page it shares
    # Ctrl-C reaches the whole session: a child not yet out of it would go on with our own frames.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        pid = os.fork()
        if pid == 0:
            _run_and_leave(name, body, close, mask)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pid


def set_name(name: str) -> None:
    """What ps and top call this process."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def _run_and_leave(
    name: str, body: Callable[[], int], close: Iterable[int], mask: Iterable[int]
) -> None:
    code = EXIT_FAILED
    try:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for fd in close:
            os.close(fd)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        set_name(name)
        code = body()
        sys.stdout.flush()
        logging.shutdown()
    except KeyboardInterrupt:  # before it left our session: the parent has had it too
        code = 128 + signal.SIGINT
    except BaseException:  # the top of the process
        traceback.print_exc()
    finally:
        os._exit(code)
